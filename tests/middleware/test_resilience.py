"""Retry, breaker, deadline, limit and existence cache: a failing store costs a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import RecordingBackend

from hicache_storage import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    ConfigError,
    Namespace,
    Store,
    hookimpl,
    open_store,
)
from hicache_storage.calling import Caller
from hicache_storage.config import build_config
from hicache_storage.middleware.around import Around
from hicache_storage.middleware.breaker import Breaker
from hicache_storage.middleware.deadline import Deadline
from hicache_storage.middleware.existence import ExistenceCache
from hicache_storage.middleware.limit import Limit
from hicache_storage.middleware.retry import Retry
from hicache_storage.middleware.stack import INNERMOST_FIRST, split_middleware, stack

KEY = "0f" * 16 + "/" + "0a" * 32
OTHER = "0f" * 16 + "/" + "0b" * 32
ALL = list(INNERMOST_FIRST)


def down(operation: str = "exists", **options: Any) -> BackendUnavailable:
    return BackendUnavailable("down", backend="memory", operation=operation, **options)


def around(backend: object, cls: type[Any], **options: Any) -> tuple[Any, Caller]:
    """The middleware round the backend, and a caller of it."""
    layer = cls(Caller(backend, name="memory"), build_config(cls.Config, cls.__name__, options))
    return layer, Caller(layer, name="memory")


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the middleware's clock; sleeping moves it too."""
    now = [1000.0]

    def forward(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", forward)
    return forward


# Every middleware


@pytest.mark.parametrize("names", [[name] for name in ALL] + [ALL])
def test_a_healthy_store_works_the_same_inside_every_middleware(
    names: list[str], target_namespace: Namespace, hashes: Callable[[int], list[str]]
) -> None:
    store = Store(stack(RecordingBackend(), "memory", {name: {} for name in names}), name="memory")
    assert store.capabilities - {"open", "close"} == Store(RecordingBackend()).capabilities
    keys, got = hashes(3), [bytearray(512) for _ in range(3)]
    assert store.batch_set(target_namespace, keys[:2], [b"\1" * 512, b"\2" * 512]) == [True] * 2
    assert store.batch_get(target_namespace, keys, got) == [True, True, False]
    assert got[:2] == [b"\1" * 512, b"\2" * 512]
    assert store.exists(target_namespace, keys) == 2
    assert len(list(store.scan())) == 2
    assert store.delete(target_namespace, keys[:1]) == [True]
    assert store.exists(target_namespace, keys) == 0
    store.clear()
    assert store.usage().pages == 0
    store.close()


@pytest.mark.parametrize("name", ALL)
def test_a_middleware_has_the_capabilities_of_the_backend_inside(name: str) -> None:
    class Small(RecordingBackend):
        delete = scan = usage = clear = None  # type: ignore[assignment]

    small = Caller(stack(Small(), "small", {name: {}}), name="small")
    assert small.capabilities.isdisjoint({"delete", "scan", "usage", "clear"})


def test_around_passes_everything_on(backend: RecordingBackend) -> None:
    caller = Caller(Around(Caller(backend, name="memory")), name="memory")
    caller.exists([KEY], [OTHER])
    assert backend.calls == [("exists", [KEY], [OTHER])]
    assert caller.scope == "process"


# Retry


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


# Breaker


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


# Deadline


class Stalling(RecordingBackend):
    """Writes into the buffers it was given only once `leave` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = threading.Event()
        self.late: list[bytes] = []

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[Any]) -> list[bool]:
        assert self.leave.wait(30)
        for span in buffers[0]:
            span[:] = b"\xaa" * len(span)
        return [True] * len(keys)

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[Any]) -> list[bool]:
        assert self.leave.wait(30)
        self.late.append(b"".join(pages[0]))
        return [True] * len(keys)


def test_a_late_answer_never_reaches_the_callers_memory() -> None:
    backend = Stalling()
    _, caller = around(backend, Deadline, seconds=0.05)
    spans = (memoryview(bytearray(64)), memoryview(bytearray(b"\xee" * 32)))
    with pytest.raises(BackendTimeout, match=r"no answer in 0.05 s") as caught:
        caller.batch_get([KEY], [spans], None)
    assert caught.value.retryable
    spans[1][:] = b"\xdd" * 32  # the slot was handed on
    backend.leave.set()
    caller.close()  # waits for the abandoned call
    assert bytes(spans[1]) == b"\xdd" * 32
    assert not [t for t in threading.enumerate() if t.name.startswith("deadline-")]


def test_a_write_that_is_left_behind_keeps_no_span() -> None:
    backend = Stalling()
    _, caller = around(backend, Deadline, seconds=0.05)
    page = (memoryview(bytearray(64)), memoryview(bytearray(b"\1" * 32)))
    with pytest.raises(BackendTimeout):
        caller.batch_set([KEY], [page], None)
    page[1][:] = b"\2" * 32
    backend.leave.set()
    caller.close()
    assert backend.late == [bytes(64) + b"\1" * 32]


def test_calls_left_behind_are_bounded() -> None:
    backend = Stalling()
    _, caller = around(backend, Deadline, seconds=0.02, abandoned=2)
    page = (memoryview(bytearray(64)),)
    for error, words in ((BackendTimeout, "no answer"),) * 2 + ((BackendUnavailable, "2 calls"),):
        with pytest.raises(error, match=words):
            caller.batch_get([KEY], [page], None)
    backend.leave.set()
    caller.close()


def test_an_error_inside_the_deadline_is_the_backends_own(backend: RecordingBackend) -> None:
    backend.fail["exists"] = down()
    with pytest.raises(BackendUnavailable, match="down"):
        around(backend, Deadline)[1].exists([KEY], None)


# Limit


def test_no_more_calls_than_allowed_are_inside_at_once_and_all_permits_return() -> None:
    inside, most, lock = 0, 0, threading.Lock()

    class Counting(RecordingBackend):
        @hookimpl
        def exists(self, keys: list[str]) -> int:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.002)
            with lock:
                inside -= 1
            if keys == [OTHER]:
                raise OSError(5, "I/O error")
            return 0

    _, caller = around(Counting(), Limit, calls=2)

    def call(key: str) -> None:
        try:
            caller.exists([key], None)
        except BackendError:
            assert key == OTHER

    threads = [threading.Thread(target=call, args=(KEY if i % 3 else OTHER,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most <= 2
    assert caller.exists([KEY], None) == 0


def test_a_call_waits_for_its_turn_no_longer_than_it_may() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(RecordingBackend):
        @hookimpl
        def exists(self) -> int:
            entered.set()
            assert leave.wait(30)
            return 0

    _, caller = around(Slow(), Limit, calls=1, wait_s=0.02)
    first = threading.Thread(target=caller.exists, args=([KEY], None))
    first.start()
    assert entered.wait(30)
    with pytest.raises(BackendTimeout, match="1 calls are under way"):
        caller.exists([KEY], None)
    leave.set()
    first.join(30)


# Existence cache


def set_page(caller: Caller, key: str) -> None:
    assert caller.batch_set([key], [(memoryview(b"x"),)], None) == [True]


def test_known_pages_are_not_asked_for_again_until_their_time_is_over(
    backend: RecordingBackend, clock: Callable[[float], None]
) -> None:
    _, caller = around(backend, ExistenceCache, found_s=10, missing_s=1)
    set_page(caller, KEY)
    assert caller.exists([KEY, OTHER], None) == 1
    assert caller.exists([KEY, OTHER], None) == 1
    assert backend.requests("exists") == [[OTHER.partition("/")[2]]]
    Caller(backend, name="other process").batch_set([OTHER], [(memoryview(b"x"),)], None)
    clock(1.1)
    assert caller.exists([KEY, OTHER], None) == 2
    backend.delete([KEY, OTHER])
    clock(8.8)
    assert caller.exists([KEY, OTHER], None) == 2, "a positive answer may be old for 10 s"
    clock(0.2)
    assert caller.exists([KEY, OTHER], None) == 0


def test_a_failed_read_turns_a_positive_answer_into_a_miss_at_once(
    backend: RecordingBackend, clock: object
) -> None:
    _, caller = around(backend, ExistenceCache, found_s=60)
    set_page(caller, KEY)
    backend.delete([KEY])
    false_hits = 0
    for _ in range(5):
        false_hits += caller.exists([KEY], None)
        caller.batch_get([KEY], [(memoryview(bytearray(1)),)], None)
    assert false_hits == 1
    set_page(caller, KEY)
    assert caller.exists([KEY], None) == 1, "a write clears it"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "get", "delete", "exists"]), st.sampled_from([KEY, OTHER])
        ),
        max_size=30,
    )
)
def test_alone_on_a_store_the_cache_is_never_wrong(steps: list[tuple[str, str]]) -> None:
    backend = RecordingBackend()
    _, caller = around(backend, ExistenceCache, found_s=1e6, missing_s=1e6)
    for verb, key in steps:
        if verb == "set":
            set_page(caller, key)
        elif verb == "get":
            caller.batch_get([key], [(memoryview(bytearray(1)),)], None)
        elif verb == "delete":
            caller.delete([key])
        for keys in ([KEY, OTHER], [OTHER, KEY]):
            assert caller.exists(keys, None) == backend.exists(keys, None)


def test_what_it_remembers_is_bounded(backend: RecordingBackend) -> None:
    cache, caller = around(backend, ExistenceCache, pages=10)
    for i in range(50):
        caller.exists([f"{'0f' * 16}/{i:064x}"], None)
    assert len(cache._known) == 10


# Naming it in a URL or a mapping


def test_middleware_is_named_by_its_options_in_a_fixed_order() -> None:
    own, asked = split_middleware(
        {
            "capacity": "1MiB",
            "retry.attempts": "5",
            "breaker": True,
            "limit": {"calls": 2},
            "deadline": "off",
        }
    )
    assert own == {"capacity": "1MiB"}
    assert asked == {"retry": {"attempts": "5"}, "breaker": {}, "limit": {"calls": 2}}
    layer: Any = stack(RecordingBackend(), "memory", asked)
    names = []
    while isinstance(layer, Around):
        names.append(type(layer).__name__)
        layer = layer.inner.backend
    assert names == ["Breaker", "Retry", "Limit"]


def test_a_url_may_name_middleware() -> None:
    with open_store("memory://?capacity=1MiB&retry.attempts=7&breaker=on") as store:
        assert isinstance(store._caller.backend, Breaker)
        assert store.usage().capacity_bytes == 1 << 20
        assert isinstance(store._caller.backend.inner.backend, Retry)
        assert store._caller.backend.inner.backend.config.attempts == 7


@pytest.mark.parametrize(
    "url", ["memory://?retry.atempts=7", "memory://?retry.attempts=many", "memory://?retry=7"]
)
def test_a_wrong_middleware_option_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"'retry'.*(attempts|option '')"):
        open_store(url)


@pytest.mark.parametrize("middleware", ALL)
def test_a_batch_is_one_call_also_of_a_backend_that_would_spread_it(
    middleware: str, target_namespace: Namespace, hashes: Callable[[int], list[str]]
) -> None:
    """So one deadline, one turn and one probe a batch, and a retry repeats all of it."""
    backend, keys = RecordingBackend(), hashes(5)
    backend.call_pages = 1
    with Store(stack(backend, "memory", {middleware: {}})) as store:
        store.open()
        assert store.batch_set(target_namespace, keys, [bytes(512)] * 5) == [True] * 5
        hits = store.batch_get(target_namespace, keys, [bytearray(512) for _ in keys])
        assert hits == [True] * 5
    assert backend.requests("batch_set") == backend.requests("batch_get") == [keys]
