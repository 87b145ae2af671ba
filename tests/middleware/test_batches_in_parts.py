"""A backend under middleware still says how batches are cut, and lends its threads for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from middleware.conftest import around, down
from recording import RecordingBackend

from hicache_storage import BackendTimeout, BackendUnavailable
from hicache_storage.calling import Caller
from hicache_storage.hookspecs import hookimpl
from hicache_storage.middleware.breaker import Breaker
from hicache_storage.middleware.deadline import Deadline
from hicache_storage.middleware.existence import ExistenceCache
from hicache_storage.middleware.guard import GuardedCalls, T
from hicache_storage.middleware.limit import Limit
from hicache_storage.middleware.retry import Retry
from hicache_storage.page import PageSpans

PAGES = 4
KEYS = ["0f" * 16 + "/" + f"{i:02x}" * 32 for i in range(PAGES)]
PASSING = [Breaker, Limit, ExistenceCache]
WHOLE = [Retry, Deadline]


class InParts(RecordingBackend):
    """Has each page read by a call of its own, on two threads."""

    def __init__(self) -> None:
        super().__init__()
        self.down_for: set[str] = set()
        self.failing: list[Exception] = []
        """What the next calls raise."""
        self.missed: set[str] = set()
        self.failing_spread: Exception | None = None

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work, slice(i, i + 1)) for i in range(count)]:
                done.result()
        if self.failing_spread:
            raise self.failing_spread

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        self.calls.append(("batch_get", keys, threading.current_thread().name))
        if self.down_for & set(keys):
            raise down("batch_get")
        if self.failing:
            raise self.failing.pop()
        return [key not in self.missed for key in keys]


class Again(GuardedCalls):
    """Makes a failed call once more, as a middleware of somebody else's may."""

    def guard(self, operation: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except BackendUnavailable:
            return call()


def read(caller: Caller) -> list[bool]:
    """As Store reads: a call for each part that the backend wants."""
    hits = [False] * PAGES

    def work(part: slice) -> None:
        hits[part] = caller.batch_get(
            KEYS[part], [(memoryview(bytearray(8)),)] * len(KEYS[part]), None
        )

    caller.spread("batch_get", 8, PAGES, work)
    return hits


@pytest.mark.parametrize("cls", PASSING)
def test_a_batch_is_cut_as_the_backend_wants_it(cls: type[Any]) -> None:
    backend = InParts()
    assert all(read(around(backend, cls)[1]))
    assert sorted(keys for _, keys, _ in backend.calls) == [[key] for key in KEYS]
    assert threading.current_thread().name not in {thread for *_, thread in backend.calls}


@pytest.mark.parametrize("cls", WHOLE)
def test_what_makes_calls_again_or_elsewhere_has_the_batch_whole(cls: type[Any]) -> None:
    backend = InParts()
    assert all(read(around(backend, cls)[1]))
    assert [keys for _, keys, _ in backend.calls] == [KEYS]


def test_a_batch_is_whole_unless_the_middleware_says_otherwise() -> None:
    """`guard` may make calls again; a part could not be."""
    backend = InParts()
    caller = Caller(Again(Caller(backend, name="memory")), name="memory")
    assert all(read(caller))
    backend.failing = [down("batch_get")]
    assert all(read(caller))
    assert [keys for _, keys, _ in backend.calls] == [KEYS] * 3


@pytest.mark.parametrize("cls", [*PASSING, *WHOLE])
def test_without_parts_a_batch_is_one_call(cls: type[Any]) -> None:
    backend = RecordingBackend()
    assert read(around(backend, cls)[1]) == [False] * PAGES
    assert len(backend.calls) == 1


def test_the_parts_of_a_failed_batch_count_as_one_failure(clock: object) -> None:
    backend = InParts()
    backend.down_for = set(KEYS)
    breaker, caller = around(backend, Breaker, failures=2)
    with pytest.raises(BackendUnavailable, match="down"):
        read(caller)
    assert breaker.state == "closed"
    with pytest.raises(BackendUnavailable, match="down"):
        read(caller)
    assert breaker.state == "open"
    calls = len(backend.calls)
    with pytest.raises(BackendUnavailable, match="not asked"):
        read(caller)
    assert len(backend.calls) == calls


def test_a_failure_that_the_backend_tells_of_at_the_end_counts_too(clock: object) -> None:
    backend = InParts()
    backend.failing_spread = down("batch_get")
    breaker, caller = around(backend, Breaker, failures=1)
    with pytest.raises(BackendUnavailable, match="down"):
        read(caller)
    assert breaker.state == "open"


def test_a_probe_is_a_whole_batch(clock: Callable[[float], None]) -> None:
    backend = InParts()
    backend.down_for = {KEYS[-1]}
    breaker, caller = around(backend, Breaker, failures=1, cooldown_s=2.0)
    with pytest.raises(BackendUnavailable):
        read(caller)
    clock(3.0)
    with pytest.raises(BackendUnavailable, match="down"):
        read(caller)  # its first parts succeed, the last one doesn't
    assert breaker.state == "open"
    clock(3.0)
    backend.down_for = set()
    assert all(read(caller))
    assert breaker.state == "closed"


def test_calls_beside_a_batch_in_parts_pass_by_the_breaker_themselves(clock: object) -> None:
    backend = InParts()
    breaker, caller = around(backend, Breaker, failures=1)
    assert all(read(caller))
    backend.down_for = {KEYS[0]}
    with pytest.raises(BackendUnavailable, match="down"):
        caller.batch_get(KEYS, [(memoryview(bytearray(8)),)] * PAGES, None)
    assert breaker.state == "open"


def test_a_batch_in_parts_takes_one_turn() -> None:
    limit, caller = around(InParts(), Limit, calls=1, wait_s=0.01)
    assert all(read(caller))
    limit._turns.get_nowait()
    with pytest.raises(BackendTimeout):
        read(caller)


def test_a_batch_within_a_part_is_a_part_already() -> None:
    _, caller = around(InParts(), Limit, calls=1, wait_s=0.01)
    within: list[bool] = []

    def work(part: slice) -> None:
        within.extend(read(caller))
        caller.batch_get(KEYS[part], [(memoryview(bytearray(8)),)], None)

    caller.spread("batch_get", 8, 1, work)
    assert within == [True] * PAGES


def test_a_batch_that_fails_at_its_end_condemns_no_page(clock: object) -> None:
    """What a part says is missing may not have been answered at all."""
    backend = InParts()
    _, caller = around(backend, ExistenceCache)
    backend.missed = {KEYS[1]}
    backend.failing_spread = down("batch_get")
    with pytest.raises(BackendUnavailable):
        read(caller)
    caller.exists(KEYS[1:2], None)
    assert backend.requests("exists") == [[KEYS[1].partition("/")[2]]]
    backend.failing_spread = None
    read(caller)
    backend.calls.clear()
    assert caller.exists(KEYS[1:2], None) == 0
    assert not backend.requests("exists")


def test_a_page_that_is_written_while_a_batch_is_read_does_not_count_as_missing(
    clock: object,
) -> None:
    backend = InParts()
    _, caller = around(backend, ExistenceCache)
    backend.missed = {KEYS[0]}

    def work(part: slice) -> None:
        assert caller.batch_get(KEYS[part], [(memoryview(bytearray(8)),)], None) == [False]
        caller.batch_set(KEYS[part], [(memoryview(bytearray(8)),)], None)

    caller.spread("batch_get", 8, 1, work)
    assert caller.exists(KEYS[:1], None) == 1
