"""A report on how the file is used, and compaction, which gives free room back to the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import lmdb
import pytest
from backends.lmdb_rig import (
    HELD,
    PAGE,
    Child,
    check_consistency,
    extent,
    file_bytes,
    found,
    key,
    opened,
    store,
)

from hicache_storage import BackendError
from hicache_storage.backends.lmdb import compact, inspect, judging


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
