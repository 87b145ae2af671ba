"""Deadline and limit: no call lasts or waits for long, and a late answer touches no memory."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from middleware.conftest import KEY, OTHER, Interrupts, around, down
from recording import RecordingBackend

from hicache_storage import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    ConfigError,
    hookimpl,
    open_store,
)
from hicache_storage.middleware.deadline import Deadline
from hicache_storage.middleware.limit import Limit


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


def test_a_call_that_is_interrupted_gives_its_turn_back(backend: RecordingBackend) -> None:
    """Wherever a function begins; where a lock may have been taken and not yet been let go."""
    limit, caller = around(backend, Limit, calls=1, wait_s=0.01)
    for place in itertools.count(1):
        interrupts = Interrupts(place, ["call"])
        interrupts.during(lambda: limit.guard("exists", lambda: None))
        if interrupts.left > 0:
            break
        thread = threading.Thread(target=caller.exists, args=([KEY], None), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert len(backend.calls) == place
    assert place > 2


@pytest.mark.parametrize(
    ("option", "words"), [("calls=0", "at least 1, got 0"), ("wait_s=-1", "not be negative")]
)
def test_a_limit_that_no_call_could_pass_is_refused(option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_store(f"memory://?limit.{option}")
