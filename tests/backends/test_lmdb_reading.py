"""Bodies that are in memory come through the map, others from the file: the same bytes."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backends.lmdb_rig import Child, check_consistency, found, key, opened, page, store
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage import BackendError
from hicache_storage.backends.lmdb import bodies

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Makes every body look cold; the ranges that are announced to the kernel."""
    announced: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def note(fd: int, start: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            announced.append((start, length))
        advise(fd, start, length, advice)

    monkeypatch.setattr(bodies, "resident", lambda fd, place: False)
    monkeypatch.setattr(bodies.os, "posix_fadvise", note)
    return announced


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.integers(1, 5000), st.integers(8100, 8800), st.integers(1, 300_000)),
        min_size=1,
        max_size=6,
    ),
    parts=st.integers(1, 9),
    is_cold=st.booleans(),
)
def test_a_page_of_any_size_in_any_spans_is_the_same_from_the_map_and_from_the_file(
    sizes: list[int], parts: int, is_cold: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "resident", lambda fd, place: not is_cold)
        backend = opened(directory, durability="async")
        keys = [key(number) for number in range(len(sizes))]
        given_pages = [page(i, size, min(3, size)) for i, size in enumerate(sizes)]
        assert backend.batch_set(keys, given_pages) == [True] * len(sizes)
        buffers = [
            tuple(memoryview(bytearray(len(span))) for span in page(i, size, min(parts, size)))
            for i, size in enumerate(sizes)
        ]
        assert backend.batch_get(keys, list(buffers)) == [True] * len(sizes)
        for i, size in enumerate(sizes):
            assert b"".join(buffers[i]) == b"".join(page(i, size))
        backend.close()


def test_cold_bodies_are_announced_at_once_and_neighbours_together(
    tmp_path: Path, cold: list[tuple[int, int]]
) -> None:
    backend = opened(tmp_path, durability="async")
    assert store(backend, range(64), 64 * KIB) == [True] * 64
    assert found(backend, range(64), 64 * KIB) == [True] * 64
    total = sum(length for _, length in cold)
    assert 64 * 64 * KIB - 64 * 512 <= total <= 64 * 64 * KIB
    assert len(cold) < 16, "bodies that were written together lie together"
    cold.clear()
    assert found(backend, [3, 40], 64 * KIB) == [True, True]
    assert 1 <= len(cold) <= 2
    assert sum(length for _, length in cold) <= 2 * 64 * KIB, "no more is read than is asked for"
    backend.close()


def test_where_a_body_lies_is_where_the_file_has_it(tmp_path: Path) -> None:
    backend = opened(tmp_path, durability="async")
    for round_number in range(4):
        for number in range(20):
            size = 700 + 10 * number if number % 5 == 1 else 2100 + 1777 * number
            content = page(1000 * round_number + number, size)
            assert backend.batch_set([key(number)], [content]) == [True]
        backend.delete([key(number) for number in range(0, 20, 3)])
    environment = backend.environment
    seen = {"in the file": 0, "in the tree": 0}
    with environment.reading() as (txn, trees), txn.cursor(db=trees.bodies) as cursor:
        for number, value in list(cursor):
            body = bodies.Body(bytes(number), len(value), ())
            place = bodies._place(cursor, body, environment.page_bytes)
            if len(value) < 2000:
                assert place is None
                seen["in the tree"] += 1
            else:
                assert place is not None
                assert os.pread(environment.data_fd, len(value), place) == bytes(value)
                seen["in the file"] += 1
            for wrong in (len(value) + 1, len(value) - 1, len(value) + (1 << 16)):
                other = bodies.Body(bytes(number), wrong, ())
                assert bodies._place(cursor, other, environment.page_bytes) is None
        assert bodies._place(cursor, bodies.Body(b"no entry", 5000, ()), 4096) is None
    assert min(seen.values()) > 0
    backend.close()


@pytest.mark.parametrize("parts", [1, 64, 1023, 1025, 3000])
def test_a_cold_page_of_more_spans_than_a_call_takes_comes_back(
    tmp_path: Path, cold: list[tuple[int, int]], parts: int
) -> None:
    backend = opened(tmp_path)
    size = 48_000
    assert store(backend, [1], size) == [True]
    spans = tuple(memoryview(bytearray(len(span))) for span in page(1, size, parts))
    assert backend.batch_get([key(1)], [spans]) == [True]
    assert b"".join(spans) == b"".join(page(1, size))
    assert cold
    backend.close()


@pytest.mark.parametrize(("parts", "calls"), [(1, 0), (16, 0), (64, 4)])
def test_a_warm_page_in_many_small_spans_is_read_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, calls: int
) -> None:
    backend = opened(tmp_path)
    store(backend, range(4), 64 * KIB)
    monkeypatch.setattr(bodies, "resident", lambda fd, place: True)
    read, made = os.preadv, []
    monkeypatch.setattr(bodies.os, "preadv", lambda *arguments: made.append(1) or read(*arguments))
    buffers = [
        tuple(memoryview(bytearray(len(span))) for span in page(i, 64 * KIB, parts))
        for i in range(4)
    ]
    assert backend.batch_get([key(i) for i in range(4)], list(buffers)) == [True] * 4
    assert [b"".join(spans) for spans in buffers] == [b"".join(page(i, 64 * KIB)) for i in range(4)]
    assert len(made) == calls
    backend.close()


def test_a_read_that_stops_early_is_gone_on_with(
    tmp_path: Path, cold: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    store(backend, range(3), 70_000)
    read = os.preadv
    pieces: list[int] = []

    def short(fd: int, spans: Any, place: int) -> int:
        first = next(span for span in spans if len(span))
        pieces.append(read(fd, [first[: max(1, len(first) // 3)]], place))
        return pieces[-1]

    monkeypatch.setattr(bodies.os, "preadv", short)
    assert found(backend, range(3), 70_000) == [True] * 3
    assert len(pieces) > 9
    backend.close()


def test_a_disk_that_fails_on_a_cold_page_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, cold: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    store(backend, range(3), 70_000)

    def fail(fd: int, spans: Any, place: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(bodies.os, "preadv", fail)
        with pytest.raises(BackendError, match="Input/output error"):
            found(backend, [1], 70_000)
    assert found(backend, range(3), 70_000) == [True] * 3
    assert not (tmp_path / "suspect").exists(), "an error of the disk proves nothing"
    backend.close()


def test_a_body_that_the_file_does_not_hold_whole_is_an_error_that_has_the_file_checked(
    tmp_path: Path, cold: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    store(backend, range(3), 70_000)
    with monkeypatch.context() as patch:
        patch.setattr(bodies.os, "preadv", lambda fd, spans, place: 0)
        with pytest.raises(BackendError, match="damaged"):
            found(backend, [1], 70_000)
    assert (tmp_path / "suspect").exists()
    backend.close()


def test_cold_reads_go_on_while_the_pages_are_rewritten(
    tmp_path: Path, cold: list[tuple[int, int]]
) -> None:
    """A place in the file is good for as long as the transaction in which it was found."""
    backend = opened(tmp_path, durability="async")
    contents = [(memoryview(bytes([n]) * 64), memoryview(bytes([n]) * 200_000)) for n in (0, 255)]
    backend.batch_set([key(0)], [contents[0]])
    stop, failures, reads = threading.Event(), [], []

    def read() -> None:
        header, body = bytearray(64), bytearray(200_000)
        while not stop.is_set():
            hit = backend.batch_get([key(0)], [(memoryview(header), memoryview(body))])
            if hit != [True] or len({*header, *body[::511], body[-1], body[-17]}) != 1:
                failures.append(hit)
            reads.append(1)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    rounds = 0
    while rounds < 300 or len(reads) < 100:
        assert backend.batch_set([key(0)], [contents[rounds % 2]]) == [True]
        rounds += 1
    stop.set()
    for reader in readers:
        reader.join(30)
    assert not failures
    check_consistency(backend)
    backend.close()


@pytest.mark.parametrize("count", [1, 3, 9, 40])
@pytest.mark.parametrize("large", [False, True])
def test_few_small_bodies_and_all_large_ones_are_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, large: bool
) -> None:
    size = bodies.LARGE_BYTES + 4096 if large else 16 * KIB
    backend = opened(tmp_path, durability="async")
    store(backend, range(count), size)
    probed: list[int] = []
    monkeypatch.setattr(bodies, "resident", lambda fd, place: probed.append(place) or True)
    assert found(backend, range(count), size) == [True] * count
    few = len({*range(0, count, bodies.PROBE_EVERY), count - 1})
    assert len(probed) == (2 * count if large else few)
    backend.close()


@pytest.fixture
def dropped_file(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A file on a disk that has left memory, and a descriptor of it."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    yield fd, path
    os.close(fd)


def test_what_is_in_memory_can_be_told(dropped_file: tuple[int, Path]) -> None:
    fd, _ = dropped_file
    if bodies.resident(fd, 700_000):
        pytest.skip("this file system keeps files in memory, or doesn't tell")
    os.pread(fd, 4096, 700_000)
    assert bodies.resident(fd, 700_000)
    with mmap.mmap(-1, mmap.PAGESIZE), open(os.devnull, "rb") as null:
        assert bodies.resident(null.fileno(), 0), "what can't be told is read through the map"


def test_parent_and_child_read_cold_pages_through_files_of_their_own(tmp_path: Path) -> None:
    output = Child(
        """
        from hicache_storage.backends.lmdb import bodies
        from backends.test_lmdb_sharing import in_child
        bodies.resident = lambda fd, place: False
        backend = opened(sys.argv[1])
        store(backend, range(8), 70_000)
        inherited = backend.environment.data_fd
        def work():
            assert found(backend, range(8), 70_000) == [True] * 8
            backend.close()
        assert in_child(work) == 0
        assert in_child(backend.close) == 0
        assert backend.environment.data_fd == inherited
        assert found(backend, range(8), 70_000) == [True] * 8
        backend.close()
        print("good")
        """,
        tmp_path,
    ).end()
    assert output == "good\n"


@pytest.mark.parametrize(
    ("size", "count", "read", "written"),
    [(MIB, 80, 4, 8), (40 * MIB, 2, 1, 1), (KIB, 1000, 512, 1000)],
)
def test_a_store_moves_few_large_pages_in_a_call(
    tmp_path: Path, size: int, count: int, read: int, written: int
) -> None:
    """Few enough for the memory that they pass through; small ones are written together."""
    backend = opened(tmp_path)
    for hook in ("batch_get", "batch_set"):
        empty: list[slice] = []
        backend.spread(hook, size, 0, empty.append)
        assert all(part == slice(0, 0) for part in empty)
    for hook, most in (("batch_get", read), ("batch_set", written)):
        parts: list[slice] = []
        backend.spread(hook, size, count, parts.append)
        numbers = [number for part in parts for number in range(count)[part]]
        assert sorted(numbers) == list(range(count))
        assert max(part.stop - part.start for part in parts) == most
