"""Threads that serve a batch: who does what, and when a call returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from backends.file_rig import found, opened, store

from hicache_storage import Namespace, Store
from hicache_storage import store as store_module
from hicache_storage.backends.file import session as session_module
from hicache_storage.backends.file import writing as writing_module

WAIT_S = 30.0
KIB = 1 << 10
ALL = 0
"""As many threads as there are for a batch."""


def namespace_of(page_bytes: int) -> Namespace:
    return Namespace(
        model="m", pool="opaque", dtype="uint8", page_size=1, page_bytes=page_bytes, layers=1,
        heads=1, head_dim=page_bytes, v_head_dim=0, order="opaque",
    )  # fmt: skip


class Meeting:
    """Holds every thread up until `expected` different ones have come, for a while."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def come(self) -> None:
        with self._changed:
            self.threads.add(threading.get_ident())
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self.threads) >= self.expected, WAIT_S)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize(
    ("page_bytes", "options", "writers", "readers"),
    [
        (16 * KIB, {}, 1, 1),
        (64 * KIB, {}, ALL, 1),
        (256 * KIB, {}, ALL, ALL),
        (256 * KIB, {"durability": "fsync"}, ALL, ALL),
        (256 * KIB, {"io_threads": 1}, 1, 1),
        (16 * KIB, {"io_threads": 3}, 3, 3),
    ],
)
def test_checksums_are_made_on_all_threads_that_serve_a_batch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page_bytes: int,
    options: dict[str, Any],
    writers: int,
    readers: int,
    threads: int,
) -> None:
    monkeypatch.setattr(session_module, "THREADS", threads)
    with Store(opened(tmp_path, **options), name="file") as pages:
        namespace = namespace_of(page_bytes)
        keys = [f"{number:064x}" for number in range(8)]
        wanted = [bytes([number]) * page_bytes for number in range(8)]
        pages.batch_set(namespace, keys[:1], wanted[:1])  # its record, too
        for name, expected in (("make_header", writers), ("check_page", readers)):
            meeting = Meeting(expected or threads)
            real = getattr(store_module, name)

            def meet(
                *args: Any, real: Callable[..., Any] = real, meeting: Meeting = meeting
            ) -> Any:
                meeting.come()
                return real(*args)

            monkeypatch.setattr(store_module, name, meet)
            if name == "make_header":
                assert pages.batch_set(namespace, keys, wanted) == [True] * 8
            else:
                got = [bytearray(page_bytes) for _ in range(8)]
                assert pages.batch_get(namespace, keys, got) == [True] * 8
                assert got == wanted
            assert len(meeting.threads) == meeting.expected


@contextmanager
def kept_busy(backend: Any, threads: int, hook: str = "batch_set") -> Iterator[None]:
    """All threads of any backend that lends some, but the caller's, are in the middle of another
    batch."""
    go_on, meeting, in_time = threading.Event(), Meeting(threads + 1), []

    def work(_: slice) -> None:
        meeting.come()
        in_time.append(go_on.wait(WAIT_S))

    other = threading.Thread(target=backend.spread, args=(hook, 1 << 20, threads, work))
    other.start()
    meeting.come()
    try:
        yield
    finally:
        go_on.set()
        other.join(WAIT_S)
    assert in_time == [True] * threads


@pytest.mark.parametrize("options", [{}, {"io_threads": 3}, {"durability": "fsync"}])
def test_an_empty_batch_and_an_empty_page_are_served_too(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Store asks for neither; others that call a backend may."""
    backend = opened(tmp_path, **options)
    assert backend.batch_set([], []) == backend.batch_get([], []) == []
    key = f"{0:032x}/{1:064x}"
    assert backend.batch_set([key], [(memoryview(b""),)]) == [True]
    assert backend.batch_get([key], [(memoryview(bytearray()),)]) == [True]
    backend.close()


def test_a_batch_does_not_wait_for_threads_that_are_busy_with_another(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    with kept_busy(backend, session_module.THREADS):
        assert store(backend, range(8), size=256 * KIB) == [True] * 8
        assert found(backend, range(8), size=256 * KIB) == [True] * 8
    backend.close()


@pytest.mark.parametrize("failing", ["own", "other"])
def test_an_error_is_raised_only_once_no_thread_is_at_the_pages_any_more(
    tmp_path: Path, failing: str
) -> None:
    backend = opened(tmp_path)
    meeting, own, over = Meeting(2), threading.get_ident(), threading.Event()

    def work(_: slice) -> None:
        meeting.come()
        if (threading.get_ident() == own) == (failing == "own"):
            raise ArithmeticError
        over.wait(0.2)
        over.set()

    with pytest.raises(ArithmeticError):
        backend.spread("batch_set", 1 << 20, 2, work)
    assert over.is_set()
    backend.close()


def test_a_call_in_the_middle_of_a_part_is_not_spread_again(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    seen: list[tuple[int, int]] = []

    def inner(part: slice) -> None:
        seen.append((part.start, part.stop))

    def work(part: slice) -> None:
        backend.spread("batch_get", 1 << 20, part.stop - part.start, inner)

    backend.spread("batch_get", 1 << 20, 8, work)
    assert seen == [(0, 2)] * 4
    seen.clear()
    backend.spread("batch_get", 1 << 20, 8, inner)
    assert sorted(seen) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    backend.close()


def test_a_batch_that_is_over_holds_nothing_of_its_caller(tmp_path: Path) -> None:
    """Also where a thread was asked for help and is still at another batch, or just got done."""
    with Store(opened(tmp_path), name="file") as pages:
        namespace, keys = namespace_of(256 * KIB), [f"{number:064x}" for number in range(4)]
        pages.batch_set(namespace, keys, [bytes(256 * KIB)] * 4)
        for busy in (True, *[False] * 50):
            got = [bytearray(256 * KIB) for _ in keys]
            with (
                kept_busy(pages._caller.backend, session_module.THREADS) if busy else nullcontext()
            ):
                assert pages.batch_get(namespace, keys, got) == [True] * 4
                for one in got:
                    one.append(0)  # BufferError if anybody still has a view


@pytest.fixture
def no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("hicache-file_"):
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield patch


def test_where_no_thread_can_be_started_the_callers_serves_the_batch(
    tmp_path: Path, no_thread_starts: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    assert store(backend, range(8), size=256 * KIB) == [True] * 8
    assert found(backend, range(8), size=256 * KIB) == [True] * 8
    session = backend._session
    assert session is not None
    assert session.failures.counts["threads"] == 2
    backend.close()


def test_a_thread_that_starts_late_does_no_part_of_a_batch_that_is_over(
    tmp_path: Path, no_thread_starts: pytest.MonkeyPatch
) -> None:
    backend, parts = opened(tmp_path), []

    def work(part: slice) -> None:
        parts.append(part)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        backend.spread("batch_set", 1 << 20, 20, work)
    assert parts == [slice(0, 4)]
    no_thread_starts.undo()
    meeting = Meeting(2)
    backend.spread("batch_set", 1 << 20, 2, lambda _: meeting.come())
    assert len(meeting.threads) == 2
    backend.close()
    assert parts == [slice(0, 4)]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_raised_only_once_no_thread_is_at_the_pages_any_more(
    tmp_path: Path,
) -> None:
    backend, caller = opened(tmp_path), threading.get_ident()
    meeting, over = Meeting(2), threading.Event()

    def work(_: slice) -> None:
        meeting.come()
        if threading.get_ident() != caller:
            over.wait(0.1)
            signal.pthread_kill(caller, signal.SIGINT)
            over.wait(0.2)
            over.set()

    with pytest.raises(KeyboardInterrupt):
        backend.spread("batch_set", 1 << 20, 2, work)
    assert over.is_set()
    backend.close()


AT_EXIT = """
import atexit, sys
from hicache_storage import Namespace, open_store
from backends.test_file_threads import namespace_of
store, namespace = open_store("file://" + sys.argv[1]), namespace_of(1 << 18)
keys, pages = [f"{number:064x}" for number in range(4)], [bytes(1 << 18)] * 4
atexit.register(lambda: print(store.batch_set(namespace, keys, pages), store.close()))
"""


def test_pages_are_stored_while_the_process_ends(tmp_path: Path) -> None:
    """When the interpreter starts no more threads; a queue in memory may be written out then."""
    tests = Path(__file__).parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(tmp_path)],
        capture_output=True, text=True, timeout=WAIT_S * 2, cwd=tests, check=False,
    )  # fmt: skip
    assert ended.stdout == "[True, True, True, True] None\n", ended.stderr


def test_a_batch_that_outlives_close_writes_to_no_file_that_is_not_the_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor belongs to whoever opens a file next."""
    backend = opened(tmp_path / "root", capacity=1 << 30)
    assert store(backend, range(2)) == [True] * 2
    written, go_on = threading.Event(), threading.Event()
    real = writing_module.publish

    def slow(*args: Any, **options: Any) -> int:
        replaced = real(*args, **options)
        written.set()
        assert go_on.wait(WAIT_S)
        return replaced

    monkeypatch.setattr(writing_module, "publish", slow)
    batch = threading.Thread(target=store, args=(backend, range(2, 3)))
    batch.start()
    assert written.wait(WAIT_S)
    before = {int(fd) for fd in os.listdir("/proc/self/fd")}
    backend.close()
    closed = before - {int(fd) for fd in os.listdir("/proc/self/fd")}
    files = [(tmp_path / f"stranger{i}").open("x+b", buffering=0) for i in range(len(closed) + 2)]
    assert closed & {file.fileno() for file in files}
    go_on.set()
    batch.join(WAIT_S)
    sizes = [os.fstat(file.fileno()).st_size for file in files]
    for file in files:
        file.close()
    assert sizes == [0] * len(files)


def test_a_store_that_can_start_no_thread_to_evict_says_so_and_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    backend = opened(tmp_path, capacity=1 << 20, io_threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        stored = store(backend, range(20), size=64 * KIB)
    assert stored[:15] == [True] * 15
    assert not all(stored)
    assert store(backend, range(20, 40), size=64 * KIB) == [True] * 20  # with its thread
    backend.close()
