"""Threads that serve a batch: who does what, and when a call returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from backends.file_rig import found, opened, store

from hicache_storage import Namespace, Store
from hicache_storage import store as store_module
from hicache_storage.backends.file import FileBackend

WAIT_S = 30.0
KIB = 1 << 10


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


@pytest.mark.parametrize(
    ("page_bytes", "options", "writers", "readers"),
    [
        (16 * KIB, {}, 1, 1),
        (64 * KIB, {}, 2, 1),
        (256 * KIB, {}, 2, 2),
        (256 * KIB, {"durability": "fsync"}, 2, 2),
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
) -> None:
    with Store(opened(tmp_path, **options), name="file") as pages:
        namespace = namespace_of(page_bytes)
        keys = [f"{number:064x}" for number in range(8)]
        wanted = [bytes([number]) * page_bytes for number in range(8)]
        pages.batch_set(namespace, keys[:1], wanted[:1])  # its record, too
        for name, expected in (("make_header", writers), ("check_page", readers)):
            meeting = Meeting(expected)
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
            assert len(meeting.threads) == expected


@contextmanager
def kept_busy(backend: FileBackend) -> Iterator[None]:
    """All threads but the caller's are in the middle of another batch."""
    go_on, meeting, in_time = threading.Event(), Meeting(3), []

    def work(_: slice) -> None:
        meeting.come()
        in_time.append(go_on.wait(WAIT_S))

    other = threading.Thread(target=backend.spread, args=("batch_set", 1 << 20, 2, work))
    other.start()
    meeting.come()
    try:
        yield
    finally:
        go_on.set()
        other.join(WAIT_S)
    assert in_time == [True, True]


def test_a_batch_does_not_wait_for_threads_that_are_busy_with_another(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    with kept_busy(backend):
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
