"""A store keeps within its capacity and what its disk has; what was used least goes first."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from backends.children import own_mounts
from backends.file_rig import (
    Child,
    found,
    key,
    opened,
    page_files,
    path_of,
    store,
    stored_bytes,
    stored_bytes_at_once,
    temp_files,
)

from hicache_storage import open_store
from hicache_storage.backends.file import evictor as evictor_module
from hicache_storage.backends.file.scanner import Scanner

PAGE = 64 + 512


def settled(backend: Any, most: int, deadline_s: float = 30.0) -> int:
    """Waits until the evictor has come down to `most` bytes; what usage says then."""
    end_s = time.monotonic() + deadline_s
    while (used := backend.usage().stored_bytes) > most and time.monotonic() < end_s:
        time.sleep(0.01)
    return used


def age(root: Path, numbers: Any) -> None:
    """Makes pages look as if they were last used in the order of `numbers`, long ago."""
    for place, number in enumerate(numbers):
        os.utime(path_of(root, number), (1e9 + place, 1e9 + place))


def test_a_full_store_takes_new_pages_and_comes_down_to_its_low_mark(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=100 * PAGE, low_watermark=0.8)
    for start in range(0, 300, 10):
        assert store(backend, range(start, start + 10)) == [True] * 10
        assert stored_bytes(tmp_path) <= 100 * PAGE
        assert backend.usage().stored_bytes <= 100 * PAGE
    assert settled(backend, 90 * PAGE) <= 90 * PAGE  # the high mark lies halfway
    backend.close()
    assert backend_bytes(tmp_path) >= stored_bytes(tmp_path) > 60 * PAGE


def backend_bytes(root: Path) -> int:
    backend = opened(root, capacity=1 << 30)
    try:
        return int(backend.usage().stored_bytes)
    finally:
        backend.close()


def test_the_least_recently_used_go_first_over_restarts_too(tmp_path: Path) -> None:
    opened(tmp_path, capacity=100 * PAGE).close()
    first = opened(tmp_path, capacity=100 * PAGE, recency_s=0.0, low_watermark=0.5)
    assert store(first, range(70)) == [True] * 70
    age(tmp_path, range(70))
    assert found(first, range(10)) == [True] * 10  # used now: they outlive the others
    assert store(first, range(10, 13)) == [True] * 3  # written again: used too
    first.close()
    second = opened(tmp_path, capacity=100 * PAGE, recency_s=0.0, low_watermark=0.5)
    assert store(second, range(100, 110)) == [True] * 10
    # What is written while pages go comes on top of the low mark.
    assert settled(second, 60 * PAGE) <= 60 * PAGE
    there = [path_of(tmp_path, number).exists() for number in range(70)]
    assert there[:13] == [True] * 13
    assert there[13:] == sorted(there[13:])
    assert not there[13]
    assert all(path_of(tmp_path, number).exists() for number in range(100, 110))


def test_hot_reads_write_no_metadata_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, recency_s=60.0)
    assert store(backend, [1]) == [True]
    touched = []
    real = os.utime
    monkeypatch.setattr(os, "utime", lambda *args, **kw: touched.append(args) or real(*args, **kw))
    for _ in range(20):
        assert found(backend, [1]) == [True]
    assert touched == []
    real(path_of(tmp_path, 1), (0, time.time() - 120))
    for _ in range(20):
        assert found(backend, [1]) == [True]
    assert len(touched) == 1
    assert time.time() - path_of(tmp_path, 1).stat().st_mtime < 60


def test_a_page_used_after_the_walk_saw_it_is_not_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, capacity=20 * PAGE, recency_s=0.0, low_watermark=0.5)
    assert store(backend, range(14)) == [True] * 14
    age(tmp_path, range(14))
    walk = Scanner.oldest_pages

    def and_then_used(self: Scanner, most: int) -> Any:
        oldest = walk(self, most)
        assert found(backend, [0, 1]) == [True, True]
        assert store(backend, [2], version=1) == [True]
        return oldest

    monkeypatch.setattr(Scanner, "oldest_pages", and_then_used)
    assert store(backend, [20, 21]) == [True] * 2
    assert settled(backend, 10 * PAGE) <= 10 * PAGE
    assert found(backend, [0, 1]) == [True, True]
    assert found(backend, [2], versions=[1]) == [True]


def test_eviction_runs_on_another_thread_and_a_batch_that_fits_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, capacity=100 * PAGE)
    running, go_on, threads = threading.Event(), threading.Event(), []
    walk = Scanner.oldest_pages

    def slowly(self: Scanner, most: int) -> Any:
        threads.append(threading.current_thread())
        running.set()
        assert go_on.wait(30)
        return walk(self, most)

    monkeypatch.setattr(Scanner, "oldest_pages", slowly)
    assert store(backend, range(96)) == [True] * 96
    assert running.wait(30)
    assert store(backend, range(96, 98)) == [True] * 2
    assert found(backend, range(98)) == [True] * 98
    go_on.set()
    assert settled(backend, 95 * PAGE) <= 95 * PAGE
    assert threading.main_thread() not in threads
    backend.close()


def test_a_writer_waits_for_room_and_gives_up_when_none_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, capacity=10 * PAGE)
    assert store(backend, range(9)) == [True] * 9
    monkeypatch.setattr(Scanner, "remove", lambda *_: 0)
    monkeypatch.setattr(evictor_module, "WAIT_S", 0.2)
    assert store(backend, range(20, 23)) == [True, False, False]
    assert stored_bytes(tmp_path) == 10 * PAGE
    assert found(backend, range(9)) == [True] * 9
    monkeypatch.undo()
    assert store(backend, range(20, 23)) == [True] * 3


@pytest.mark.parametrize("size", [1000, 100_000])
def test_a_page_larger_than_the_store_is_refused_and_evicts_nothing(
    tmp_path: Path, size: int
) -> None:
    backend = opened(tmp_path, capacity=1000)
    assert store(backend, [1], size=300) == [True]
    assert store(backend, [2], size=size) == [False]
    assert found(backend, [1], size=300) == [True]


def test_files_removed_by_hand_make_room_again(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=100 * PAGE)
    assert store(backend, range(90)) == [True] * 90
    for number in range(0, 90, 2):
        path_of(tmp_path, number).unlink()
    assert store(backend, range(100, 150)) == [True] * 50
    assert found(backend, range(1, 90, 2)) == [True] * 45
    assert found(backend, range(100, 150)) == [True] * 50
    backend.close()  # ends the evictor
    assert stored_bytes(tmp_path) <= backend_bytes(tmp_path) <= 100 * PAGE


def test_files_put_there_by_hand_are_counted_at_the_next_recount(tmp_path: Path) -> None:
    donor = opened(tmp_path / "donor")
    assert store(donor, range(50)) == [True] * 50
    backend = opened(tmp_path / "root", capacity=1000 * PAGE, resync_s=0.01)
    assert store(backend, range(50, 60)) == [True] * 10
    for number in range(50):
        path_of(tmp_path / "root", number).parent.mkdir(exist_ok=True)
        path_of(tmp_path / "donor", number).rename(path_of(tmp_path / "root", number))
    # Writes notice that a recount is due; one may have been under way while files were moved.
    for number in range(60, 460):
        time.sleep(0.02)
        assert store(backend, [number]) == [True]
        if backend.usage().pages == number + 1:
            break
    assert backend.usage().stored_bytes == (number + 1) * PAGE


def test_the_namespace_s_record_is_evicted_after_all_pages(
    tmp_path: Path, target_namespace: Any, hashes: Any
) -> None:
    with open_store(f"file://{tmp_path}/root", min_free=0, capacity=40_000) as opened_store:
        for number in range(0, 300, 10):
            keys = hashes(300)[number : number + 10]
            opened_store.batch_set(target_namespace, keys, [bytes(512)] * 10)
        assert opened_store.namespaces() == {target_namespace.digest: target_namespace}
        assert opened_store.usage().stored_bytes <= 40_000


SHARE = """
backend = opened(sys.argv[1], capacity=int(sys.argv[3]), recency_s=0.0)
number, refused = int(sys.argv[2]), 0
for start in range(number * 10000, number * 10000 + 400, 4):
    refused += store(backend, range(start, start + 4)).count(False)
    found(backend, range(start - 20, start + 4))
backend.close()
print(refused)
"""


def test_processes_that_share_a_capacity_keep_within_it_and_never_trip_over_each_other(
    tmp_path: Path,
) -> None:
    """All of them evict, half of the files are removed by hand meanwhile, and the sum on the
    disk is looked at all the time."""
    opened(tmp_path, capacity=30 * PAGE).close()
    children = [Child(SHARE, tmp_path, number, 30 * PAGE) for number in range(3)]
    most, removed = 0, 0
    while any(child.process.poll() is None for child in children):
        pids = [child.process.pid for child in children if child.process.poll() is None]
        most = max(most, stored_bytes_at_once(tmp_path, pids))
        for path in page_files(tmp_path)[:4]:
            removed += not path.name.endswith(".tmp")
            if not path.name.endswith(".tmp"):
                path.unlink(missing_ok=True)
        time.sleep(0.01)
    refused = [int(child.end().splitlines()[-1]) for child in children]
    assert most <= 30 * PAGE
    assert removed > 20
    assert sum(refused) < 100, refused
    assert temp_files(tmp_path) == []
    backend = opened(tmp_path, capacity=30 * PAGE, resync_s=0.001)
    assert store(backend, [1]) == [True]
    end_s = time.monotonic() + 30
    while backend.usage().stored_bytes != stored_bytes(tmp_path) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert backend.usage().stored_bytes == stored_bytes(tmp_path)


# -- the file system -----------------------------------------------------------------------------


def test_what_the_file_system_shall_keep_free_is_kept_by_evicting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free bytes are simulated: 100 pages' worth less what the store holds."""
    real = os.statvfs

    def statvfs(path: str) -> Any:
        class Status:
            f_frsize = 1
            f_bavail = 100 * PAGE - stored_bytes(tmp_path)

        return Status if str(path) == str(tmp_path) else real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    backend = opened(tmp_path, min_free=60 * PAGE)
    for start in range(0, 200, 10):
        assert store(backend, range(start, start + 10)) == [True] * 10
        assert stored_bytes(tmp_path) <= 40 * PAGE
    monkeypatch.setattr(evictor_module, "WAIT_S", 0.2)
    backend.close()
    stuffed = opened(tmp_path, min_free=200 * PAGE)  # more than there is, with an empty store too
    assert store(stuffed, range(300, 303)) == [False] * 3


MOUNT = """
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", sys.argv[1]], check=True)
"""

FULL = (
    MOUNT
    + """
os.mkdir(sys.argv[1] + "/root")
backend = opened(sys.argv[1] + "/root", **eval(sys.argv[2]))
half = 512 * 1024 - 64 - 8192
answers = [store(backend, [number], half) for number in range(5)]
there = [found(backend, [number], half) for number in range(5)]
assert not temp_files(sys.argv[1]), temp_files(sys.argv[1])
print(answers.count([True]), there.count([True]), there[4] == [True], backend.usage().pages)
foreign = open(sys.argv[1] + "/foreign", "wb")
try:
    while foreign.write(bytes(4096)):
        foreign.flush()
except OSError:
    pass
print(store(backend, [9], half), there == [found(backend, [number], half) for number in range(5)])
"""
)


def test_a_disk_that_is_really_full_evicts_then_refuses_and_goes_on_reading(tmp_path: Path) -> None:
    """1 MiB of tmpfs, pages of half a MiB: without a capacity, with one that fits, and with one
    that the disk hasn't got."""
    prefix = own_mounts()
    for options in ({}, {"capacity": 1100_000}, {"capacity": 600_000}, {"capacity": 10_000_000}):
        with Child(FULL, tmp_path, options, prefix=prefix) as child:
            lines = [line for line in child.end().splitlines() if line[0] in "[0123456789"]
        stored, there, newest, _ = lines[0].split()
        assert (stored, newest) == ("5", "True"), lines
        assert int(there) == 1 + (options.get("capacity") != 600_000), lines
        # Somebody else filled the disk: the old pages make way, or the new one is refused.
        assert lines[1] in ("[True] False", "[False] True", "[False] False"), lines


READ_ONLY = (
    MOUNT
    + """
writer = opened(sys.argv[1] + "/root", capacity=1 << 20)
assert store(writer, range(4)) == [True] * 4
writer.close()
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
before = sorted(map(str, page_files(sys.argv[1])))
backend = opened(sys.argv[1] + "/root", capacity=1 << 20)
assert found(backend, range(5)) == [True] * 4 + [False]
assert backend.exists([key(number) for number in range(5)]) == 4
assert store(backend, range(4, 6)) == [False] * 2
assert store(backend, range(4, 6)) == [False] * 2
assert backend.delete([key(0), key(9)]) == [False, True]
assert len(list(backend.scan(""))) == 4
backend.flush()
backend.close()
assert sorted(map(str, page_files(sys.argv[1]))) == before
"""
)


def test_a_read_only_file_system_is_read_and_says_so_once(tmp_path: Path) -> None:
    with Child(READ_ONLY, tmp_path, prefix=own_mounts()) as child:
        output = child.end()
    assert output.count("can't be written to and is only read") == 1, output


def test_a_store_opened_only_for_reading_changes_nothing(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    assert store(writer, range(3)) == [True] * 3
    os.utime(path_of(tmp_path, 1), (1, 1))
    os.truncate(path_of(tmp_path, 2), 100)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    reader = opened(tmp_path, read_only=True, recency_s=0.0, capacity=PAGE)
    assert found(reader, range(4)) == [True, True, False, False]
    assert store(reader, [5, 0]) == [False, False]
    assert reader.delete([key(0), key(9)]) == [False, True]
    with pytest.raises(Exception, match="read_only"):
        reader.clear()
    reader.flush()
    reader.close()
    after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    assert after == before


@pytest.mark.parametrize("place", ["ledger", "evictor.lock", "writers"])
def test_a_store_of_another_user_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    assert store(opened(tmp_path), [1]) == [True]
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if f"/{place}" in str(path) and flags & os.O_ACCMODE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    backend = opened(tmp_path, capacity=1 << 20)
    assert found(backend, [1]) == [True]
    assert store(backend, [2]) == [False]
    backend.close()


def test_a_ledger_that_can_not_be_written_costs_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are refused, or stored and counted later; nothing raises and reading goes on."""
    backend = opened(tmp_path, capacity=1 << 20)
    assert store(backend, range(3)) == [True] * 3
    real = os.pwrite
    for number in (errno.ENOSPC, errno.EIO):

        def fail(*_: Any, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pwrite", fail)
        assert store(backend, [10]) == [False]
        assert backend.delete([key(0)]) == [True]
        assert found(backend, range(3)) == [False, True, True]
        monkeypatch.setattr(os, "pwrite", real)
        assert store(backend, [0, 10 + number]) == [True, True]


def test_usage_without_a_capacity_counts_what_is_there(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    assert store(backend, range(5)) == [True] * 5
    path_of(tmp_path, 3).unlink()
    assert backend.usage() == (4, 4 * PAGE, None)


def test_a_store_that_was_cleared_is_empty_by_its_own_account_too(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=50 * PAGE, resync_s=0.001)
    for start in range(0, 200, 10):
        store(backend, range(start, start + 10))
        backend.clear()
        assert backend.usage() == (0, 0, 50 * PAGE)
    assert page_files(tmp_path) == []
    assert not [path for path in tmp_path.iterdir() if path.name != ".hicache-storage"]


def test_opening_does_not_wait_for_another_process_that_evicts(tmp_path: Path) -> None:
    first = opened(tmp_path, capacity=50 * PAGE)
    space = first._session.space  # type: ignore[union-attr]
    done = threading.Event()
    with space._evictor._turn.held():  # type: ignore[union-attr]
        opener = threading.Thread(
            target=lambda: (opened(tmp_path, capacity=50 * PAGE).close(), done.set())
        )
        opener.start()
        assert done.wait(30)
    opener.join(30)
