"""Retries, deadlines and the number of requests at a time."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
from backends.s3.misbehaving_server import (
    MisbehavingServer,
    Misbehaviour,
    Seen,
    Sometimes,
    drip,
    error,
    half_body,
    hang_up,
    reset,
    slowly,
    stall,
)
from backends.s3.rig import KEYS, NAMESPACE, PAGE_BYTES, Opened, page

from hicache_storage import BackendError, BackendTimeout, BackendUnavailable
from hicache_storage.backends.s3.connections import Connections

Open = Callable[..., Opened]
SLOW_DOWN = error(503, "SlowDown", "Please reduce your request rate.")


def every(count: int, verb: str = "") -> Callable[[Seen], bool]:
    """Picks each count-th request (of a verb)."""
    return lambda seen: seen.number % count == 0 and verb in ("", seen.verb)


@pytest.mark.parametrize("answer", [SLOW_DOWN, error(429), error(503)])
@pytest.mark.parametrize("operation", ["get", "set", "exists"])
def test_slow_down_now_and_then_costs_no_page(
    server: MisbehavingServer, opened: Open, answer: Misbehaviour, operation: str
) -> None:
    store = opened(server, attempts=40, deadline_s=60)
    store.fill(128)
    server.behave = Sometimes(answer, lambda seen: seen.number % 10 < 3)
    numbers = list(range(128))
    if operation == "get":
        assert store.get(numbers) == [True] * 128
    elif operation == "set":
        store.fill(128)
    else:
        assert store.exists(numbers) == 128
    assert store.backend.counts.throttles > 20


def test_slow_down_for_good_gives_misses_within_the_deadline(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server, deadline_s=1)
    store.fill(128)
    server.behave = Sometimes(SLOW_DOWN)
    started = time.monotonic()
    assert store.get(list(range(128))) == [False] * 128
    assert store.store.batch_set(NAMESPACE, KEYS[:4], [page(i) for i in range(4)]) == [False] * 4
    assert store.exists([0, 1]) == 0
    assert time.monotonic() - started < 12


def test_slow_down_lowers_the_requests_at_a_time_and_answers_raise_them(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server, concurrency=32)
    store.fill(64)
    gate = store.backend._here.now().plane.gate
    assert gate.bound == 32
    server.behave = Sometimes(SLOW_DOWN, every(2))
    store.get(list(range(64)))
    lowered = gate.bound
    assert lowered < 20
    server.behave = lambda seen: None
    for _ in range(20):
        store.get(list(range(64)))
    assert gate.bound > lowered


CALLS = ("get", "get one", "set", "exists", "delete")
SLOW: dict[str, Misbehaviour] = {
    "stall": stall(30),
    "drip": drip(100, 0.2),
    "late": slowly(3),
    "throttle": SLOW_DOWN,
    "error": error(500),
    "hang up": hang_up,
}


@pytest.mark.parametrize(
    ("operation", "kind"),
    [(c, kind) for kind in SLOW for c in CALLS if kind != "drip" or c in ("get", "get one")],
)
def test_a_call_ends_at_its_deadline_whatever_the_store_does(
    server: MisbehavingServer, opened: Open, operation: str, kind: str
) -> None:
    opened(server).fill(20)  # which a busy machine may take longer for
    store = opened(server, deadline_s=0.6, attempts=100, concurrency=8)
    server.behave = Sometimes(SLOW[kind])
    numbers = list(range(20))
    started = time.monotonic()
    pages = [page(i) for i in numbers]
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: store.get(numbers),
        "get one": lambda: store.get([1]),
        "set": lambda: store.store.batch_set(NAMESPACE, KEYS[:20], pages),
        "exists": lambda: store.exists(numbers),
        "delete": lambda: store.store.delete(NAMESPACE, KEYS[:20]),
    }
    failure: BackendError | None = None
    answer: object = None
    try:
        answer = calls[operation]()
    except (BackendTimeout, BackendUnavailable) as error:
        failure = error
    if failure is None:
        assert answer in ([False] * 20, [False], 0)
    else:
        assert failure.retryable
    assert time.monotonic() - started < 0.6 * 1.1 + 3.0  # three seconds for a busy machine


def test_what_arrived_before_the_deadline_counts(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server, deadline_s=3)
    store.fill(10)
    server.behave = Sometimes(stall(30), lambda seen: seen.path.endswith((KEYS[3], KEYS[7])))
    assert store.get(list(range(10))) == [i not in (3, 7) for i in range(10)]


def test_a_stalled_request_is_tried_again_elsewhere(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server, stall_timeout_s=0.3)
    store.fill(10)
    server.behave = Sometimes(stall(30), lambda seen: seen.verb == "GET", times=3)
    assert store.get(list(range(10))) == [True] * 10


def test_a_slow_page_that_keeps_coming_is_not_stalled(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server, stall_timeout_s=2)
    store.fill(1)
    server.behave = Sometimes(drip(500, 0.3))
    assert store.get([0]) == [True]
    assert store.backend.counts.retries == 0


def test_resets_under_many_requests_at_a_time_cost_no_page(opened: Open) -> None:
    """The store answers four at a time and resets one connection in a hundred: waiting in our
    queue is not a slow request, and a reset is no lost page."""
    with MisbehavingServer(delay_s=0.002, most_at_once=4) as server:
        store = opened(server, concurrency=256)
        store.fill(256)
        server.behave = Sometimes(reset, every(100))
        for _ in range(3):
            assert store.get(list(range(256))) == [True] * 256
        store.fill(256)
        assert store.backend.counts.retries >= 3


@pytest.mark.parametrize("by_reset", [True, False])
def test_a_retry_reads_the_page_from_its_first_byte(
    server: MisbehavingServer, opened: Open, by_reset: bool
) -> None:
    store = opened(server)
    store.fill(4)
    server.behave = Sometimes(half_body(by_reset=by_reset), lambda s: s.verb == "GET", times=6)
    assert store.get([0, 1, 2, 3]) == [True] * 4


def test_nothing_is_tried_again_that_cannot_succeed(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    store.fill(2)
    server.forget()
    server.behave = Sometimes(error(400, "InvalidArgument", "no"))
    with pytest.raises(BackendUnavailable, match="InvalidArgument no") as caught:
        store.get([0])
    assert not caught.value.retryable
    assert len(server.seen) == 1


@pytest.mark.parametrize("concurrency", [1, 2, 7])
def test_every_permit_comes_back(server: MisbehavingServer, opened: Open, concurrency: int) -> None:
    """After success, misses, errors and deadlines alike; one permit is enough to finish."""
    store = opened(server, concurrency=concurrency, attempts=2, deadline_s=5)
    store.fill(10)
    gate = store.backend._here.now().plane.gate
    failing = tuple(KEYS[i] for i in (2, 5, 8))
    for misbehave in (error(404), error(500), reset, half_body(by_reset=False), SLOW_DOWN):
        server.behave = Sometimes(misbehave, lambda seen: seen.path.endswith(failing))
        hits = store.get(list(range(10)))
        assert hits == [i not in (2, 5, 8) for i in range(10)]
        assert gate.running == 0
    server.behave = Sometimes(error(400, "Bad"), lambda seen: seen.path.endswith(KEYS[4]))
    with pytest.raises(BackendUnavailable):
        store.get(list(range(10)))
    assert gate.running == 0
    assert gate._tickets == []


def test_connections_are_kept_and_never_more_than_the_requests_at_a_time(opened: Open) -> None:
    with MisbehavingServer(delay_s=0.005) as server:
        store = opened(server, concurrency=64)
        store.fill(100)
        for _ in range(10):
            store.get(list(range(100)))
        assert 1 < server.connects <= 64
        assert server.most_at_once <= 64
        assert store.backend.counts.connects == server.connects


def test_threads_share_the_bound(opened: Open) -> None:
    with MisbehavingServer(delay_s=0.005) as server:
        store = opened(server, concurrency=8)
        store.fill(40)
        failures: list[Exception] = []

        def reads() -> None:
            try:
                for _ in range(3):
                    assert store.get(list(range(40))) == [True] * 40
            except Exception as failure:
                failures.append(failure)

        threads = [threading.Thread(target=reads) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert server.most_at_once <= 8
        assert server.connects <= 8


def test_small_calls_do_not_wait_for_a_large_one(opened: Open) -> None:
    """A read of 128 pages holds all permits when four reads of two pages come: they are served
    within a few rounds, while the large one goes on."""
    with MisbehavingServer(delay_s=0.1) as server:
        store = opened(server, concurrency=8, deadline_s=60)
        store.fill(128)
        order: list[str] = []
        started = threading.Event()
        server.behave = lambda seen: started.set() if seen.verb == "GET" else None  # type: ignore[func-returns-value]

        def read(name: str, numbers: list[int]) -> None:
            store.get(numbers)
            order.append(name)

        large = threading.Thread(target=read, args=("large", list(range(128))))
        large.start()
        assert started.wait(30)
        small = [threading.Thread(target=read, args=("small", [i, i + 1])) for i in range(4)]
        for thread in small:
            thread.start()
        for thread in (*small, large):
            thread.join(60)
        assert order == ["small"] * 4 + ["large"]


def test_a_call_uses_every_permit_it_can(opened: Open) -> None:
    with MisbehavingServer(delay_s=0.05) as server:
        store = opened(server, concurrency=32)
        store.fill(128)
        server.forget()
        store.get(list(range(128)))
        assert server.most_at_once > 16


@pytest.mark.parametrize(
    "misbehave",
    [error(500), hang_up, reset, half_body(by_reset=True), stall(5), "no connection"],
    ids=["error", "hang up", "reset", "half a body", "silent", "no connection"],
)
def test_a_page_that_is_given_up_leaves_no_view_of_its_buffer(
    server: MisbehavingServer,
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
    misbehave: Misbehaviour | str,
) -> None:
    """Also before the garbage collector has been round: the call is over, the memory another's."""
    store = opened(server, attempts=2, concurrency=1, stall_timeout_s=0.2)
    store.fill(2)
    behave = hang_up if isinstance(misbehave, str) else misbehave
    server.behave = Sometimes(behave, lambda seen: seen.path.endswith(KEYS[1]))
    if isinstance(misbehave, str):

        def refused(*_: object) -> None:
            raise ConnectionRefusedError("refused")

        monkeypatch.setattr(Connections, "new", refused)
    buffers = [bytearray(PAGE_BYTES) for _ in range(2)]
    gc.collect()
    gc.disable()
    try:
        assert store.store.batch_get(NAMESPACE, KEYS[:2], buffers) == [True, False]
        for buffer in buffers:
            buffer.append(0)  # BufferError if anybody still has a view
    finally:
        gc.enable()
