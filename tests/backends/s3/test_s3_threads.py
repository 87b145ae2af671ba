"""Threads that read a batch of large pages from s3://: what they share, and how they end."""

from __future__ import annotations

import functools
import gc
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from backends.s3.misbehaving_server import (
    MisbehavingServer,
    Misbehaviour,
    Seen,
    Sometimes,
    error,
    stall,
)
from backends.s3.rig import KEYS, Opened, page, split
from backends.s3.test_s3_processes import ended_well, in_child
from backends.test_file_threads import KIB, Meeting, kept_busy, namespace_of

from hicache_storage import (
    BackendTimeout,
    BackendUnavailable,
    HiCacheStorageError,
)
from hicache_storage.backends.s3 import backend as backend_module
from hicache_storage.backends.s3.call import Batch, Call
from hicache_storage.backends.s3.connections import Connections
from hicache_storage.backends.s3.endpoint import Endpoint

Open = Callable[..., Opened]
LARGE = 1024 * KIB
WAIT_S = 30.0
SLOW_DOWN = error(503, "SlowDown")

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(params=[2, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many threads read, however many cores there are."""
    monkeypatch.setattr(backend_module, "THREADS", request.param)
    return int(request.param)


@functools.cache
def large(number: int) -> bytes:
    return page(number, LARGE)


def fill(store: Opened, count: int) -> None:
    keys, pages = KEYS[:count], [large(i) for i in range(count)]
    assert all(store.store.batch_set(namespace_of(LARGE), keys, pages))


def read(store: Opened, count: int, *, scattered: bool = True) -> list[bool]:
    """Reads the first pages; a hit is checked to be the right page, the bytes around the buffers
    to be untouched, and nothing to have a view of them any more."""
    guarded = [bytearray(b"\xa5" * (LARGE + 32)) for _ in range(count)]
    inner = [memoryview(one)[16:-16] for one in guarded]
    spans = [split(view, i + 3) if scattered else (view,) for i, view in enumerate(inner)]
    hits = store.store.batch_get(namespace_of(LARGE), KEYS[:count], spans)
    del inner, spans
    for i, hit, one in zip(range(count), hits, guarded, strict=True):
        assert one[:16] == one[-16:] == b"\xa5" * 16
        assert not hit or one[16:-16] == large(i)
        one.append(0)  # BufferError if anybody still has a view
    return hits


def of(*numbers: int) -> Callable[[Seen], bool]:
    """Picks the reads of these pages."""
    names = tuple(KEYS[number] for number in numbers)
    return lambda seen: seen.verb == "GET" and seen.path.endswith(names)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def nothing_is_left(store: Opened) -> bool:
    gate = store.backend._here.now().plane.gate
    return gate.running == 0 and gate._tickets == []


# what is read


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("concurrency", [1, 32])
def test_pages_arrive_whole_whatever_their_number_and_wherever_one_is_missing(
    server: MisbehavingServer, opened: Open, threads: int, concurrency: int, scattered: bool
) -> None:
    store = opened(server, concurrency=concurrency)
    most = 2 * threads + 1
    fill(store, most)
    names = {
        number: next(n for n in server.objects if n.endswith(KEYS[number]))
        for number in range(most)
    }
    for count in (1, threads - 1, threads, threads + 1, most):
        assert read(store, count, scattered=scattered) == [True] * count
        step = -(-count // threads)
        borders = {*range(0, count, step), *range(step - 1, count, step)}
        for missing in ({count // 2}, {0}, {count - 1}, borders, set(range(count))):
            kept = {names[i]: server.objects.pop(names[i]) for i in missing}
            expected = [i not in missing for i in range(count)]
            assert read(store, count, scattered=scattered) == expected
            server.objects |= kept
    assert nothing_is_left(store)
    assert server.most_at_once <= concurrency


@pytest.mark.parametrize("page_bytes", [LARGE - 1, LARGE])
def test_large_pages_are_read_by_several_threads_and_small_ones_in_one_call(
    server: MisbehavingServer,
    opened: Open,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
    page_bytes: int,
) -> None:
    store, namespace = opened(server), namespace_of(page_bytes)
    keys, pages = KEYS[:8], [page(i, page_bytes) for i in range(8)]
    store.store.batch_set(namespace, keys[:1], pages[:1])  # its record, too
    own, real = threading.get_ident(), Call.run
    calls: list[tuple[int, str]] = []
    meeting = Meeting(threads if page_bytes == LARGE else 1)

    def run(call: Call) -> Any:
        calls.append((threading.get_ident(), call._operation))
        if call._operation == "batch_get":
            meeting.come()
        return real(call)

    monkeypatch.setattr(Call, "run", run)
    assert store.store.batch_set(namespace, keys, pages) == [True] * 8
    assert store.store.exists(namespace, keys) == 8
    assert calls == [(own, "batch_set"), (own, "exists")]
    calls.clear()
    got = [bytearray(page_bytes) for _ in keys]
    assert store.store.batch_get(namespace, keys, got) == [True] * 8
    assert got == pages
    assert len(calls) == len(meeting.threads) == meeting.expected
    assert own in meeting.threads


def test_an_empty_batch_has_no_parts(server: MisbehavingServer, opened: Open, threads: int) -> None:
    """Store doesn't ask for one; others that call a backend may."""
    parts: list[slice] = []
    opened(server).backend.spread("batch_get", LARGE, 0, parts.append)
    assert parts == []


# deadlines


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("busy", [True, False])
def test_a_batch_on_a_hanging_store_ends_at_its_deadline(
    server: MisbehavingServer, opened: Open, threads: int, answered: bool, busy: bool
) -> None:
    """Not a deadline for each part, where nobody else is free to take them."""
    count = 2 * threads
    store = opened(server, deadline_s=2.5)
    fill(store, count)
    server.behave = Sometimes(stall(WAIT_S), of(*range(answered, count)))
    with kept_busy(store.backend, threads, "batch_get") if busy else nullcontext(), at_most(4.5):
        if answered:
            assert read(store, count) == [True] + [False] * (count - 1)
        else:
            with pytest.raises(BackendTimeout):
                read(store, count)
    assert nothing_is_left(store)


def test_a_part_that_begins_after_the_deadline_asks_for_nothing(
    server: MisbehavingServer, opened: Open, threads: int
) -> None:
    store = opened(server, deadline_s=1)
    fill(store, 2 * threads)
    server.forget()
    server.behave = Sometimes(stall(WAIT_S), of(1))
    with kept_busy(store.backend, threads, "batch_get"):
        assert read(store, 2 * threads) == [True] + [False] * (2 * threads - 1)
    assert {seen.path[-64:] for seen in server.seen} == {KEYS[0], KEYS[1]}


@pytest.mark.parametrize("busy", [True, False])
def test_an_unreachable_store_costs_a_batch_the_connect_timeout(
    server: MisbehavingServer, opened: Open, threads: int, busy: bool
) -> None:
    store = opened(server, connect_timeout_s=1.5, deadline_s=60)
    plane = store.backend._here.now().plane
    plane.connections.drop_idle()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        filler = [socket.socket() for _ in range(3)]
        for one in filler:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        resolver = plane.connections._resolver
        resolver._found = [a._replace(target=full.getsockname()) for a in resolver._found]
        with (
            kept_busy(store.backend, threads, "batch_get") if busy else nullcontext(),
            at_most(2.8),
            pytest.raises(BackendUnavailable, match="connect") as caught,
        ):
            read(store, 2 * threads)
        assert caught.value.retryable
        for one in filler:
            one.close()
    assert nothing_is_left(store)


# failing stores


@pytest.mark.parametrize("misbehave", [error(500), SLOW_DOWN], ids=["error", "slow down"])
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_page_that_fails_for_ever_alone_in_a_part_is_missed_alone(
    server: MisbehavingServer,
    opened: Open,
    threads: int,
    misbehave: Misbehaviour,
    busy: bool,
    failing: tuple[int, ...],
) -> None:
    """Also if it is given up before another part has begun."""
    count = threads if len(failing) < threads else threads + 1
    store = opened(server, attempts=2)
    fill(store, count)
    server.behave = Sometimes(misbehave, of(*failing))
    with kept_busy(store.backend, threads, "batch_get") if busy else nullcontext():
        assert read(store, count) == [i not in failing for i in range(count)]
    found = [store.store.exists(namespace_of(LARGE), [KEYS[i]]) for i in range(count)]
    assert found == [i not in failing or misbehave is SLOW_DOWN for i in range(count)]
    assert nothing_is_left(store)


@pytest.mark.parametrize("busy", [True, False])
def test_a_batch_of_which_nothing_is_answered_is_an_error_after_few_requests(
    server: MisbehavingServer, opened: Open, threads: int, busy: bool
) -> None:
    store = opened(server, attempts=4)
    fill(store, threads)
    server.forget()
    server.behave = Sometimes(error(500))
    with (
        kept_busy(store.backend, threads, "batch_get") if busy else nullcontext(),
        pytest.raises(BackendUnavailable, match="500") as caught,
    ):
        read(store, threads)
    assert caught.value.retryable
    assert len(server.seen) <= (4 + threads - 1 if busy else 4 * threads)
    server.behave = lambda seen: None
    assert store.store.exists(namespace_of(LARGE), KEYS[:threads]) == threads
    assert read(store, threads) == [True] * threads


def test_a_store_that_asks_for_less_gives_misses_also_in_parts_that_it_leaves_waiting(
    server: MisbehavingServer, opened: Open, threads: int
) -> None:
    store = opened(server, deadline_s=1, attempts=100)
    fill(store, threads)
    slow_down, hang = Sometimes(SLOW_DOWN, of(0)), stall(WAIT_S)
    server.behave = lambda seen: slow_down(seen) or hang
    assert read(store, threads) == [False] * threads


def test_an_answer_to_one_part_is_not_forgotten_by_another(
    server: MisbehavingServer, opened: Open, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that reads `answered` and writes it back may undo what another wrote between."""
    written: list[bool] = []

    class Watched(Batch):
        @property
        def answered(self) -> bool:
            return False

        @answered.setter
        def answered(self, value: bool) -> None:
            written.append(value)

    monkeypatch.setattr(backend_module, "Batch", Watched)
    store = opened(server, attempts=1)
    fill(store, 2)
    written.clear()
    server.behave = Sometimes(error(500))
    with pytest.raises(BackendUnavailable):
        read(store, 2)
    assert written == [False]  # as it was made


def test_an_error_of_one_part_ends_the_others_at_once(
    server: MisbehavingServer, opened: Open, threads: int
) -> None:
    store = opened(server, deadline_s=60, stall_timeout_s=60)
    fill(store, threads)
    refuse, hang = Sometimes(error(400, "Bad"), of(threads - 1)), stall(WAIT_S)
    server.behave = lambda seen: refuse(seen) or hang
    with at_most(10), pytest.raises(BackendUnavailable, match="Bad"):
        read(store, threads)
    assert nothing_is_left(store)


# ends


def named_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("hicache-s3")]


@pytest.mark.parametrize("concurrency", [1, 32])
@pytest.mark.parametrize("misbehave", [stall(WAIT_S), SLOW_DOWN], ids=["hanging", "backing off"])
def test_closing_breaks_off_a_read_and_leaves_no_thread(
    server: MisbehavingServer, opened: Open, threads: int, misbehave: Misbehaviour, concurrency: int
) -> None:
    before = len(named_threads())
    store = opened(server, deadline_s=60, stall_timeout_s=60, attempts=100, concurrency=concurrency)
    fill(store, 2 * threads)
    server.forget()
    server.behave = Sometimes(misbehave)
    buffers = [bytearray(LARGE) for _ in range(2 * threads)]
    failures: list[BaseException] = []

    def reading() -> None:
        try:
            store.store.batch_get(namespace_of(LARGE), KEYS[: len(buffers)], buffers)
        except BaseException as failure:
            failures.append(failure)

    readers = [threading.Thread(target=reading) for _ in range(2)]
    for reader in readers:
        reader.start()
    until_s = time.monotonic() + WAIT_S
    while len(server.seen) < concurrency // 8 + 1 and time.monotonic() < until_s:
        time.sleep(0.01)
    with at_most(10):
        store.store.close()
        for reader in readers:
            reader.join(WAIT_S)
    assert len(failures) == 2
    assert all(isinstance(failure, HiCacheStorageError) for failure in failures)
    assert len(named_threads()) == before
    failures.clear()
    gc.collect()
    for one in buffers:
        one.append(0)


def test_no_kept_connection_is_taken_once_they_are_being_closed() -> None:
    """One taken then would be missed by `close`, which would leave its reader waiting."""
    with MisbehavingServer() as server:
        endpoint = Endpoint("http", "127.0.0.1", server.port, "", "eu-test-1")
        connections = Connections(endpoint, None)
        connection = connections.new(time.monotonic() + WAIT_S)
        for _ in connection.connect():
            time.sleep(0.05)
        assert connection.is_quiet()
        connections.give(connection)
        real, taken = connections.drop_idle, []

        def drop_idle() -> None:
            taken.append(connections.take())
            real()

        connections.drop_idle = drop_idle  # type: ignore[method-assign]
        connections.close()
        assert taken == [None]


def test_forked_children_read_with_threads_of_their_own(
    server: MisbehavingServer, opened: Open, threads: int
) -> None:
    """Also while the parent's threads read."""
    count = 2 * threads
    store = opened(server)
    fill(store, count)
    assert read(store, count) == [True] * count
    stop = threading.Event()
    failures: list[Exception] = []

    def reading() -> None:
        try:
            while not stop.is_set():
                assert read(store, count) == [True] * count
        except Exception as failure:
            failures.append(failure)

    def child() -> None:
        meeting = Meeting(threads)
        assert read(store, count) == [True] * count
        store.backend.spread("batch_get", LARGE, threads, lambda _: meeting.come())
        assert len(meeting.threads) == threads
        store.store.close()

    reader = threading.Thread(target=reading)
    reader.start()
    children = [in_child(child) for _ in range(3)]
    stop.set()
    reader.join(WAIT_S)
    children.append(in_child(child))
    assert ended_well(children)
    assert not failures
    assert read(store, count) == [True] * count


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_raised_soon_and_leaves_nothing_at_work_on_the_pages(
    server: MisbehavingServer, opened: Open, threads: int
) -> None:
    store = opened(server, deadline_s=60, stall_timeout_s=60)
    fill(store, threads)
    server.forget()
    go_on = threading.Event()

    def late(talk: Any, seen: Seen) -> None:
        go_on.wait(WAIT_S)
        talk.server.usual(talk, seen)

    server.behave = Sometimes(late)
    caller = threading.get_ident()

    def interrupt() -> None:
        until_s = time.monotonic() + WAIT_S
        while len(server.seen) < threads and time.monotonic() < until_s:
            time.sleep(0.01)
        signal.pthread_kill(caller, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    buffers = [bytearray(LARGE) for _ in range(threads)]
    thread.start()
    with at_most(10), pytest.raises(KeyboardInterrupt):
        store.store.batch_get(namespace_of(LARGE), KEYS[:threads], buffers)
    thread.join(WAIT_S)
    assert nothing_is_left(store)
    go_on.set()
    server.behave = lambda seen: None
    assert read(store, threads) == [True] * threads
    gc.collect()
    for one in buffers:
        one.append(0)
    assert all(one == bytes(LARGE + 1) for one in buffers)
