"""Capacity and recency, room that is used again, fragmentation and compaction."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import lmdb
import pytest
from backends.lmdb_rig import (
    Child,
    check_consistency,
    extent,
    file_bytes,
    found,
    key,
    opened,
    page,
    store,
)

from hicache_storage import BackendError
from hicache_storage.backends.lmdb import backend as backend_module
from hicache_storage.backends.lmdb import compact, inspect, judging, reading
from hicache_storage.backends.lmdb.recency import AT_ONCE
from hicache_storage.backends.lmdb.writing import Writer

KIB, MIB = 1 << 10, 1 << 20
PAGE = 16 * KIB
HELD = PAGE + 64
"""Bytes that a page of PAGE counts for: its header is stored too."""


def there(backend: object, numbers: range) -> list[int]:
    """Which pages are there, without using them."""
    return [number for number in numbers if backend.exists([key(number)])]  # type: ignore[attr-defined]


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


# -- capacity ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("pages_a_part", [3, 100])
def test_a_batch_never_evicts_its_own_pages_for_its_rest(
    tmp_path: Path, pages_a_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever parts Store writes it. What has no room once isn't tried for again."""
    monkeypatch.setattr(backend_module, "BY_THREADS_BYTES", 1)
    monkeypatch.setattr(backend_module, "WRITTEN_BYTES", pages_a_part * HELD)
    backend = opened(tmp_path, capacity=8 * HELD, recency_s=0)
    tried = []
    evict = Writer._evict
    monkeypatch.setattr(Writer, "_evict", lambda *args: tried.append(args) or evict(*args))

    def stored(numbers: Sequence[int]) -> list[bool]:
        answers: list[bool] = []

        def write(part: slice) -> None:
            answers.extend(store(backend, numbers[part], PAGE))

        backend.spread("batch_set", HELD, len(numbers), write)
        return answers

    assert stored(range(100, 106)) == [True] * 6
    assert stored(range(20)) == [True] * 8 + [False] * 12
    assert there(backend, range(20)) == list(range(8))
    assert len(tried) <= 1
    # Those found stored count as the batch's own too.
    assert stored([*range(8), 30]) == [True] * 8 + [False]
    assert there(backend, range(31)) == list(range(8))
    check_consistency(backend)
    backend.close()


def test_a_page_larger_than_the_capacity_is_refused_and_costs_no_other(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=4 * HELD)
    store(backend, range(3), PAGE)
    large = page(9, 5 * PAGE)
    assert backend.batch_set([key(9), key(3)], [large, page(3, PAGE)]) == [False, True]
    assert there(backend, range(10)) == [0, 1, 2, 3]
    backend.close()


def test_replacing_a_page_in_a_full_store_frees_the_old_one_first(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=4 * HELD)
    for number in range(4):
        store(backend, [number], PAGE)
        time.sleep(0.002)
    for number in (0, 3, 1):
        assert backend.batch_set([key(number)], [page(100 + number, PAGE)]) == [True]
    assert there(backend, range(4)) == [0, 1, 2, 3]
    assert backend.usage().stored_bytes == 4 * HELD
    check_consistency(backend)
    backend.close()


def test_a_smaller_capacity_is_kept_from_the_next_batch_on(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    store(backend, range(40), PAGE)
    backend.close()
    backend = opened(tmp_path, capacity=10 * HELD)
    assert backend.usage().capacity_bytes == 10 * HELD
    assert store(backend, [50], PAGE) == [True]
    assert backend.usage().stored_bytes <= 10 * HELD
    assert there(backend, range(51)) == [*range(31, 40), 50]
    backend.close()


def test_the_file_of_a_full_store_stays_near_its_capacity(tmp_path: Path) -> None:
    capacity = 16 * MIB
    backend = opened(tmp_path, capacity=capacity, durability="async", map_size=MIB)
    for start in range(0, 4000, 50):
        assert all(store(backend, range(start, start + 50), 64 * KIB))
        assert backend.usage().stored_bytes <= capacity
    assert file_bytes(tmp_path) < 2 * capacity
    check_consistency(backend)
    backend.close()


def test_several_processes_keep_one_capacity_together(tmp_path: Path) -> None:
    children = [
        Child(
            f"""
            backend = opened(sys.argv[1], capacity={64 * HELD}, durability="async")
            first = int(sys.argv[2])
            for start in range(first, first + 400, 8):
                assert store(backend, range(start, start + 8), {PAGE}) == [True] * 8
                assert backend.usage().stored_bytes <= {64 * HELD}
            backend.close()
            """,
            tmp_path,
            first,
        )
        for first in (0, 10_000, 20_000)
    ]
    for child in children:
        with child:
            child.end()
    backend = opened(tmp_path)
    assert check_consistency(backend) <= 64
    backend.close()


# -- inspection and compaction -------------------------------------------------------------------


def test_a_report_says_how_the_file_is_used_also_while_it_is_in_use(tmp_path: Path) -> None:
    backend = opened(tmp_path, durability="async")
    store(backend, range(300), PAGE)
    backend.delete([key(number) for number in range(0, 300, 3)])
    store(backend, [1000], 100)
    inside = inspect(tmp_path)
    with Child(
        """
        from hicache_storage.backends.lmdb import inspect
        report = inspect(sys.argv[1])
        print(report.pages, report.stored_bytes, report.free_bytes)
        """,
        tmp_path,
    ) as other:
        assert other.end().split() == [
            str(inside.pages),
            str(inside.stored_bytes),
            str(inside.free_bytes),
        ]
    assert inside.pages == 201
    assert inside.stored_bytes == 200 * HELD + 164
    assert inside.used_bytes + inside.free_bytes >= inside.file_bytes - 4096
    assert inside.free_bytes > 90 * PAGE
    assert PAGE <= inside.longest_free_bytes < inside.free_bytes
    assert 0.2 < inside.waste < 0.5
    assert inside.readers == 0
    with backend.environment.reading():
        assert inspect(tmp_path).readers == 1
    assert store(backend, [1001]) == [True], "the store goes on"
    backend.close()
    assert inspect(str(tmp_path)).pages == 202


def test_compaction_gives_the_free_room_back_and_keeps_every_page(tmp_path: Path) -> None:
    backend = opened(tmp_path, durability="async", capacity=1 << 30)
    store(backend, range(400), PAGE)
    backend.delete([key(number) for number in range(400) if number % 4])
    with pytest.raises(BackendError, match="in use"):
        compact(tmp_path)
    backend.close()
    done = compact(tmp_path)
    assert done.before_bytes > 400 * PAGE
    assert 100 * PAGE < done.after_bytes == file_bytes(tmp_path) < 120 * PAGE
    assert extent(tmp_path).free_pages == 0
    assert not list(tmp_path.glob("compact-*"))
    backend = opened(tmp_path, durability="async", capacity=1 << 30)
    assert found(backend, range(400), PAGE) == [number % 4 == 0 for number in range(400)]
    assert store(backend, range(500, 520), PAGE) == [True] * 20
    assert check_consistency(backend) == 120
    backend.close()
    assert compact(tmp_path).after_bytes > 0


def test_compaction_refuses_what_another_process_has_open(tmp_path: Path) -> None:
    opened(tmp_path).close()
    user = Child(
        "b = opened(sys.argv[1]); print('open', flush=True); sys.stdin.readline(); b.close()",
        tmp_path,
    )
    with user:
        assert user.line() == "open"
        inode = os.stat(tmp_path / "data.mdb").st_ino
        with pytest.raises(BackendError, match="in use"):
            compact(tmp_path)
        assert os.stat(tmp_path / "data.mdb").st_ino == inode
        user.tell()
        user.end()
    compact(tmp_path)


def test_compaction_of_a_damaged_or_foreign_environment_changes_nothing(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    backend = opened(ours)
    store(backend, range(100), PAGE)
    backend.close()
    os.truncate(ours / "data.mdb", file_bytes(ours) // 2)
    before = (ours / "data.mdb").read_bytes()
    with pytest.raises(BackendError, match="damaged"):
        compact(ours)
    with pytest.raises(BackendError, match="damaged"):
        inspect(ours)
    assert (ours / "data.mdb").read_bytes() == before
    theirs = tmp_path / "theirs"
    with lmdb.open(str(theirs)) as handle, handle.begin(write=True) as txn:
        txn.put(b"a", b"b")
    with pytest.raises(BackendError, match="another program"):
        compact(theirs)
    for operation in (compact, inspect):
        with pytest.raises(BackendError, match="no store"):
            operation(tmp_path / "nothing")


def test_compaction_needs_room_for_the_copy_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path).close()

    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr("hicache_storage.backends.lmdb.inspection.os.statvfs", lambda path: Full)
    with pytest.raises(BackendError, match="free bytes"):
        compact(tmp_path)


def test_what_a_killed_compaction_left_is_removed_by_the_next_opening(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    store(backend, range(10), PAGE)
    backend.close()
    (tmp_path / "compact-abc").mkdir()
    (tmp_path / "compact-abc" / "data.mdb").write_bytes(b"half")
    backend = opened(tmp_path)
    assert found(backend, range(10), PAGE) == [True] * 10
    assert not list(tmp_path.glob("compact-*"))
    backend.close()


def test_openers_wait_while_a_store_is_compacted(tmp_path: Path) -> None:
    opened(tmp_path).close()
    opener = Child("opened(sys.argv[1]).close(); print('done')", tmp_path)
    with judging.setup_lock(str(tmp_path)):
        time.sleep(1.0)
        assert opener.process.poll() is None
    with opener:
        assert opener.end() == "done\n"


def test_a_batch_is_not_refused_because_others_wrote_while_it_waited(tmp_path: Path) -> None:
    """Its pages count as used when they are written, not when the call began."""
    backend = opened(tmp_path, capacity=8 * HELD)
    with Child(
        f"""
        backend = opened(sys.argv[1], capacity={8 * HELD})
        with backend.environment.writing() as (txn, trees):
            print("writing", flush=True)
            sys.stdin.readline()
            changes = Changes(txn, trees, 4096)
            for number in range(100, 108):
                changes.put(key(number).encode(), page(number, {PAGE}), now_ms(), Scratch())
            changes.finish()
        backend.close()
        """.replace(
            "backend =",
            "from hicache_storage.backends.lmdb.records import Changes, Scratch; "
            "from hicache_storage.backends.lmdb.recency import now_ms; backend =",
            1,
        ),
        tmp_path,
    ) as other:
        assert other.line() == "writing"
        answers: list[list[bool]] = []
        waiting = threading.Thread(target=lambda: answers.append(store(backend, range(6), PAGE)))
        waiting.start()
        time.sleep(0.3)
        other.tell()
        waiting.join(30)
        other.end()
    assert answers == [[True] * 6]
    assert there(backend, range(6)) == list(range(6))
    backend.close()
