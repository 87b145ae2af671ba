"""The least recently used pages go first, by what all processes wrote down of their uses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from backends.lmdb_rig import HELD, PAGE, Child, check_consistency, found, key, opened, store, there

from hicache_storage.backends.lmdb.recency import AT_ONCE

MIB = 1 << 20


def test_the_least_recently_used_pages_go_first(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=10 * HELD, recency_s=0)
    for number in range(10):
        assert store(backend, [number], PAGE) == [True]
        time.sleep(0.002)
    assert found(backend, [0, 2], PAGE) == [True, True]
    time.sleep(0.002)
    assert store(backend, range(10, 14), PAGE) == [True] * 4
    assert there(backend, range(14)) == [0, 2, 6, 7, 8, 9, 10, 11, 12, 13]
    assert backend.usage().stored_bytes == 10 * HELD
    check_consistency(backend)
    backend.close()


def test_setting_a_page_that_is_stored_already_counts_as_a_use(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=4 * HELD, recency_s=0)
    for number in range(4):
        store(backend, [number], PAGE)
        time.sleep(0.002)
    assert store(backend, [0], PAGE) == [True]
    assert store(backend, [4, 5], PAGE) == [True, True]
    assert there(backend, range(6)) == [0, 3, 4, 5]
    backend.close()


def test_processes_share_what_they_know_of_recency(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=6 * HELD, recency_s=0)
    for number in range(6):
        store(backend, [number], PAGE)
        time.sleep(0.002)
    with Child(
        f"""
        backend = opened(sys.argv[1], capacity={6 * HELD}, recency_s=0)
        assert found(backend, [0, 1, 2], {PAGE}) == [True] * 3
        backend.close()
        """,
        tmp_path,
    ) as reader:
        reader.end()
    assert store(backend, [6, 7, 8], PAGE) == [True] * 3
    assert there(backend, range(9)) == [0, 1, 2, 6, 7, 8]
    backend.close()


@pytest.mark.parametrize(("recency_s", "writes"), [(0.0, 20), (3600.0, 0)])
def test_a_use_is_written_down_at_most_once_in_the_stated_time(
    tmp_path: Path, recency_s: float, writes: int
) -> None:
    backend = opened(tmp_path, capacity=MIB, recency_s=recency_s)
    store(backend, range(4))

    def commits() -> int:
        return int(backend.environment.handle.info()["last_txnid"])

    before = commits()
    for _ in range(20):
        time.sleep(0.002)
        assert found(backend, range(4)) == [True] * 4
    assert commits() - before == writes
    backend.close()


def test_uses_are_written_together(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=64 * MIB, recency_s=30)
    count = 2 * AT_ONCE + 10
    store(backend, range(count), 600)
    with backend.environment.writing() as (txn, trees):
        from hicache_storage.backends.lmdb.records import Changes

        changes = Changes(txn, trees, 4096)
        # As if all of it had been stored long ago.
        for number in range(count):
            record = changes.record(key(number).encode())
            assert record is not None
            txn.delete(record.order_key, db=trees.recency)
            raw = record.raw[:8] + bytes(8) + record.raw[16:]
            txn.put(key(number).encode(), raw, db=trees.pages)
            txn.put(bytes(8) + record.number_key, key(number).encode(), db=trees.recency)
    before = int(backend.environment.handle.info()["last_txnid"])
    for start in range(0, count, 10):
        assert all(found(backend, range(start, min(start + 10, count)), 600))
    written = int(backend.environment.handle.info()["last_txnid"]) - before
    assert written == 2, "once for every AT_ONCE uses"
    assert backend._recency.pending == 10
    backend.flush()
    assert backend._recency.pending == 0
    assert check_consistency(backend) == count
    backend.close()


@pytest.mark.parametrize("end", ["close", "flush", "batch_set"])
def test_uses_that_wait_are_written_by_whatever_comes_next(tmp_path: Path, end: str) -> None:
    backend = opened(tmp_path, capacity=MIB, recency_s=0.3)
    store(backend, [1])
    before = {entry.key: entry.used_s or 0.0 for entry in backend.scan("")}
    time.sleep(0.35)
    assert found(backend, [1]) == [True]
    if backend._recency.pending:  # unless this test was held up so long that it is due
        if end == "close":
            backend.close()
            backend = opened(tmp_path)
        elif end == "flush":
            backend.flush()
        else:
            store(backend, [2])
    after = {entry.key: entry.used_s or 0.0 for entry in backend.scan(key(1))}
    assert after[key(1)] >= before[key(1)] + 0.3
    backend.close()
