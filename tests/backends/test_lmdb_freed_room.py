"""Freed room is used again: no read, lookup or scan keeps old pages for long."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from backends.lmdb_rig import check_consistency, file_bytes, found, key, opened, page, store

from hicache_storage.backends.lmdb import backend as backend_module
from hicache_storage.backends.lmdb import reading

KIB = 1 << 10


@pytest.mark.parametrize(("readers", "most"), [(0, 3), (2, 20)])
def test_pages_rewritten_again_and_again_do_not_make_the_file_grow_without_end(
    tmp_path: Path, readers: int, most: int
) -> None:
    """Two hundred times what is stored is written. While others read, as many old versions stay
    as are written during one short read transaction."""
    backend = opened(tmp_path, durability="async")
    size, count = 64 * KIB, 100
    stop, reads = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            found_by_length(backend, range(count), size)
            reads.append(1)

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for round_number in range(200):
        for start in range(0, count, 10):
            numbers = range(start, start + 10)
            pages = [page(round_number * 1000 + number, size) for number in numbers]
            keys = [key(number) for number in numbers]
            assert backend.batch_set(keys, pages) == [True] * 10
    stop.set()
    for thread in threads:
        thread.join(60)
    assert len(reads) >= readers
    assert file_bytes(tmp_path) < most * count * size
    assert backend.usage().stored_bytes == count * (size + 64)
    check_consistency(backend)
    backend.close()


def found_by_length(backend: object, numbers: range, size: int) -> None:
    """Reads pages whose content isn't looked at."""
    buffers = [(memoryview(bytearray(64)), memoryview(bytearray(size))) for _ in numbers]
    backend.batch_get([key(number) for number in numbers], buffers)  # type: ignore[attr-defined]


def test_a_long_batch_is_read_and_looked_up_in_several_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are freed meanwhile can't be used again before a read transaction ends."""
    backend = opened(tmp_path)
    store(backend, range(30))
    begun: list[bool] = []
    begin = backend.environment._begin
    monkeypatch.setattr(
        backend.environment, "_begin", lambda write: begun.append(write) or begin(write=write)
    )
    for name, most, transactions in (("SLICE_PAGES", 4, 8), ("SLICE_BYTES", 10_000, 16)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, name, most)
            assert found(backend, range(31)) == [True] * 30 + [False]
        assert begun == [False] * transactions
        begun.clear()
    monkeypatch.setattr(backend_module, "LOOKUP_PAGES", 7)
    assert backend.exists([key(number) for number in range(31)]) == 30
    assert begun == [False] * 5
    backend.close()


def test_one_read_transaction_reads_a_bounded_number_of_bytes() -> None:
    mib = reading.SLICE_BYTES >> 20
    parts = list(reading.slices([1 << 20] * 100))
    assert [part.stop - part.start for part in parts[:-1]] == [mib] * (100 // mib)
    assert parts[-1].stop == 100
    assert list(reading.slices([1 << 30, 1, 1 << 30])) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert [part.stop - part.start for part in reading.slices([1] * 1100)] == [512, 512, 76]


def test_a_scan_that_is_left_half_way_pins_nothing(tmp_path: Path) -> None:
    backend = opened(tmp_path, durability="async")
    store(backend, range(1200), 4 * KIB)
    scan = backend.scan("")
    next(scan)
    assert backend.environment.reader_count() == 0
    live = file_bytes(tmp_path)
    for _ in range(10):
        backend.batch_set([key(n) for n in range(1200)], [page(n, 4 * KIB) for n in range(1200)])
        backend.delete([key(number) for number in range(0, 1200, 2)])
        store(backend, range(1200), 4 * KIB)
    assert file_bytes(tmp_path) < 3 * live
    assert len(list(scan)) == 1199
    backend.close()


def test_a_scan_goes_on_from_its_key_while_pages_come_and_go(tmp_path: Path) -> None:
    backend = opened(tmp_path, durability="async")
    store(backend, range(1500), 100)
    names = sorted(key(number) for number in range(1500))
    scan = backend.scan("")
    first = [next(scan).key for _ in range(700)]
    assert first == names[:700]
    backend.delete(names[:100] + names[1100:1200])
    store(backend, range(5000, 5100), 100)
    rest = [entry.key for entry in scan]
    assert rest == sorted(set(rest))
    # Up to the end of the part that was read already, what it gives may be gone.
    assert set(names[1024:1100] + names[1200:]) <= set(rest)
    assert not set(rest) & set(first)
    backend.close()
