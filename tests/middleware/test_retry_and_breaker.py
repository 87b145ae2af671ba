"""Retry and breaker: a failing store costs a bounded number of calls and a bounded time."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from middleware.conftest import KEY, Interrupts, around, down
from recording import RecordingBackend

from hicache_storage import BackendUnavailable, hookimpl
from hicache_storage.middleware import breaker as breaker_module
from hicache_storage.middleware.breaker import Breaker
from hicache_storage.middleware.retry import Retry


def failing_times(backend: RecordingBackend, times: int, error: Exception) -> None:
    """`exists` raises `error` so many times, then answers."""
    answer = backend.exists

    def exists(keys: list[str], prefix_keys: list[str] | None) -> int:
        nonlocal times
        times -= 1
        if times >= 0:
            backend.calls.append(("exists", keys, prefix_keys))
            raise error
        return answer(keys, prefix_keys)

    backend.exists = hookimpl(exists)  # type: ignore[method-assign]


def test_a_retryable_error_is_tried_again_and_another_is_not(
    backend: RecordingBackend, clock: object
) -> None:
    failing_times(backend, 2, down())
    retry, caller = around(backend, Retry, attempts=3)
    assert caller.exists([KEY], None) == 0
    assert (len(backend.calls), retry.retries) == (3, 2)
    lasting = RecordingBackend()
    failing_times(lasting, 1, down(retryable=False))
    with pytest.raises(BackendUnavailable):
        around(lasting, Retry)[1].exists([KEY], None)
    assert len(lasting.calls) == 1


def test_giving_up_clears_the_mark_so_that_no_outer_layer_tries_again(
    backend: RecordingBackend, clock: object
) -> None:
    failing_times(backend, 99, down())
    _, inner = around(backend, Retry, attempts=2)
    _, outer = around(inner.backend, Retry, attempts=5)
    with pytest.raises(BackendUnavailable) as caught:
        outer.exists([KEY], None)
    assert not caught.value.retryable
    assert len(backend.calls) == 2


def test_retries_stop_at_the_total_time(backend: RecordingBackend, clock: object) -> None:
    failing_times(backend, 10_000, down())
    started = time.monotonic()
    with pytest.raises(BackendUnavailable):
        around(backend, Retry, attempts=10_000, total_s=3.0)[1].exists([KEY], None)
    assert time.monotonic() - started <= 3.0


def test_a_store_that_fails_for_everyone_is_not_flooded(
    backend: RecordingBackend, clock: object
) -> None:
    failing_times(backend, 10_000, down())
    _, caller = around(backend, Retry, attempts=5, budget=0.1)
    for _ in range(300):
        with pytest.raises(BackendUnavailable):
            caller.exists([KEY], None)
    assert len(backend.calls) <= 300 * 1.1 + Retry.SAVED_AT_MOST


def test_the_breaker_opens_after_failures_in_a_row_and_then_costs_nothing(
    backend: RecordingBackend, clock: Callable[[float], None]
) -> None:
    backend.fail["exists"] = down()
    breaker, caller = around(backend, Breaker, failures=3, cooldown_s=2)
    for _ in range(20):
        with pytest.raises(BackendUnavailable):
            caller.exists([KEY], None)
    assert len(backend.calls) == 3
    assert (breaker.state, breaker.rejected_calls) == ("open", 17)


def test_a_success_or_a_miss_in_between_keeps_it_closed(
    backend: RecordingBackend, clock: object
) -> None:
    breaker, caller = around(backend, Breaker, failures=3)
    for _ in range(10):
        backend.fail["exists"] = down()
        for _ in range(2):
            with pytest.raises(BackendUnavailable):
                caller.exists([KEY], None)
        backend.fail.clear()
        assert caller.exists([KEY], None) == 0
    assert breaker.state == "closed"


def test_one_probe_is_let_through_after_the_cooldown_and_decides(
    backend: RecordingBackend, clock: Callable[[float], None]
) -> None:
    backend.fail["exists"] = down()
    breaker, caller = around(backend, Breaker, failures=1, cooldown_s=2)
    for seconds, calls, state in ((0, 1, "open"), (1.9, 1, "open"), (0.2, 2, "open")):
        clock(seconds)
        with pytest.raises(BackendUnavailable):
            caller.exists([KEY], None)
        assert (len(backend.calls), breaker.state) == (calls, state)
    backend.fail.clear()
    clock(2.1)
    assert caller.exists([KEY], None) == 0
    assert breaker.state == "closed"


def test_while_the_probe_is_under_way_no_other_call_passes(
    clock: Callable[[float], None],
) -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(RecordingBackend):
        @hookimpl
        def batch_get(self, keys: list[str], buffers: list[Any]) -> list[bool]:
            entered.set()
            assert leave.wait(30)
            return [False]

    backend = Slow()
    backend.fail["exists"] = down()
    breaker, caller = around(backend, Breaker, failures=1, cooldown_s=2)
    with pytest.raises(BackendUnavailable):
        caller.exists([KEY], None)
    clock(3)
    probe = threading.Thread(target=caller.batch_get, args=([KEY], [()], None))
    probe.start()
    assert entered.wait(30)
    with pytest.raises(BackendUnavailable, match="not asked"):
        caller.exists([KEY], None)
    leave.set()
    probe.join(30)
    assert breaker.state == "closed"


@pytest.mark.parametrize("failing", [False, True])
def test_a_probe_that_is_interrupted_anywhere_leaves_room_for_the_next(
    failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Logging's own locks would be left locked.
    monkeypatch.setattr(breaker_module, "logger", SimpleNamespace(warning=lambda *_: None))
    for place in itertools.count(1):
        backend = RecordingBackend()
        backend.fail["exists"] = down()
        breaker, caller = around(backend, Breaker, failures=1, cooldown_s=0.0)
        with pytest.raises(BackendUnavailable):
            caller.exists([KEY], None)

        def probed(breaker: Breaker = breaker) -> None:
            if failing:
                with contextlib.suppress(BackendUnavailable):
                    breaker.guard("exists", lambda: (_ for _ in ()).throw(down()))
            else:
                breaker.guard("exists", lambda: None)

        interrupts = Interrupts(place)
        interrupts.during(probed)
        backend.fail.clear()
        assert caller.exists([KEY], None) == 0
        assert breaker.state == "closed"
        if interrupts.left > 0:
            break
    assert place > 5


def test_a_probe_that_is_interrupted_leaves_room_for_the_next(
    backend: RecordingBackend, clock: Callable[[float], None]
) -> None:
    backend.fail["exists"] = down()
    breaker, caller = around(backend, Breaker, failures=1, cooldown_s=2)
    with pytest.raises(BackendUnavailable):
        caller.exists([KEY], None)
    clock(3)
    with pytest.raises(KeyboardInterrupt):
        breaker.guard("exists", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    backend.fail.clear()
    assert caller.exists([KEY], None) == 0
