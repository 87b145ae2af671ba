"""Writers that are killed at any moment lose nothing acknowledged and leave nothing behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from backends.children import TESTS
from backends.file_rig import (
    Child,
    found,
    opened,
    page,
    path_of,
    store,
    stored_bytes,
    stored_bytes_at_once,
    temp_files,
)
from backends.file_writer import size_of

from hicache_storage.backends.file import ledger


class KilledWriter:
    """A `file_writer.py`, whose workers are killed."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "backends/file_writer.py"), str(root), repr(options)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(TESTS)]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, number: int) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        word, pid = self.process.stdout.readline().split()
        assert word == "pid"
        return int(pid)

    def acknowledged(self) -> list[int]:
        """The pages whose True came out before the worker died."""
        assert self.process.stdout is not None
        numbers: list[int] = []
        while (line := self.process.stdout.readline()) != "over\n":
            assert line.endswith("\n"), "the parent of the killed worker died too"
            numbers += map(int, line.split())
        return numbers

    def __enter__(self) -> KilledWriter:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if error[0] is not None:
            self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


def check_whole(backend: Any, numbers: list[int]) -> list[bool]:
    """Which pages are there; each must be right (`found` sees to that)."""
    return [found(backend, [number], size_of(number))[0] for number in numbers]


@pytest.mark.parametrize(
    ("durability", "rounds", "wait_s"), [("none", 150, (0.005, 0.06)), ("fsync", 50, (0.02, 0.12))]
)
def test_a_killed_writer_loses_no_acknowledged_page_and_its_temporary_files_are_swept(
    tmp_path: Path, durability: str, rounds: int, wait_s: tuple[float, float]
) -> None:
    """Each round a fresh worker is killed after a random while, in the middle of anything. What
    it had acknowledged is read by a store that was open all the time."""
    options = {"durability": durability, "temp_age_s": 0.0}
    reader = opened(tmp_path, temp_age_s=0.0)
    pick = random.Random(durability)
    left_behind = acknowledged = 0
    with KilledWriter(tmp_path, **options) as writer:
        for number in range(rounds):
            start = 1_000_000 * (number + 1)
            pid = writer.start(start)
            time.sleep(pick.uniform(*wait_s))
            os.kill(pid, signal.SIGKILL)
            told = writer.acknowledged()
            assert all(check_whole(reader, told)), f"lost in round {number}"
            check_whole(reader, list(range(start, start + 60)))  # half-written ones among them
            acknowledged += len(told)
            left_behind += len(temp_files(tmp_path))
            if number % 10 == 9:
                opened(tmp_path, temp_age_s=0.0).close()
                assert temp_files(tmp_path) == []
                reader.clear()
    assert acknowledged > rounds // 2, "most workers were killed before they wrote anything"
    assert left_behind > 0, "no worker was killed in the middle of a page"


def test_killed_writers_under_a_capacity_leave_right_pages_and_a_true_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three writers at once, all evicting; one of them dies each round. The sum on the disk stays
    within the capacity, but for what the dead were writing."""
    capacity = 12_000_000
    options = {"capacity": capacity, "temp_age_s": 0.0, "recency_s": 0.0}
    reader = opened(tmp_path, **options)
    pick, most, there, rounds = random.Random(3), 0, 0, 40
    with ExitStack() as stack:
        writers = [stack.enter_context(KilledWriter(tmp_path, **options)) for _ in range(3)]
        started = [writer.start(1_000_000 * i) for i, writer in enumerate(writers, 1)]
        for number in range(rounds):
            victim = number % 3
            time.sleep(pick.uniform(0.01, 0.08))
            most = max(most, stored_bytes_at_once(tmp_path, started))
            os.kill(started[victim], signal.SIGKILL)
            told = writers[victim].acknowledged()
            there += sum(check_whole(reader, told[-8:]))  # evicted or right, never wrong
            started[victim] = writers[victim].start(1_000_000 * (number + 10))
        for pid, writer in zip(started, writers, strict=True):
            os.kill(pid, signal.SIGKILL)
            writer.acknowledged()
    assert most <= capacity
    assert there > rounds
    reader.close()
    monkeypatch.setattr(ledger, "KEEP_S", 0.0)
    last = opened(tmp_path, capacity=capacity, temp_age_s=0.0, resync_s=0.001)
    assert temp_files(tmp_path) == []
    end_s = time.monotonic() + 30
    for number in itertools.count():  # what the dead had reserved drops out after some recounts
        assert store(last, [number], 600) == [True]
        time.sleep(0.02)
        if last.usage().stored_bytes == stored_bytes(tmp_path) or time.monotonic() > end_s:
            break
    assert last.usage().stored_bytes == stored_bytes(tmp_path) <= capacity


DIE_BEFORE_RENAME = """
from hicache_storage.backends.file import transfer
backend = opened(sys.argv[1])
transfer.put_in_place = lambda *_: os.kill(os.getpid(), 9)
store(backend, [int(sys.argv[2])], 8 << 20, version=1)
"""


def test_a_writer_killed_before_its_rename_leaves_the_old_page_and_a_file_that_nobody_counts(
    tmp_path: Path,
) -> None:
    """Pages of 8 MiB, killed when the new one is written and not yet published."""
    backend = opened(tmp_path, capacity=1 << 30)
    assert store(backend, [1], 8 << 20) == [True]
    for count in range(1, 4):
        with Child(DIE_BEFORE_RENAME, tmp_path, 1) as child:
            assert child.process.wait(60) == -signal.SIGKILL
        assert len(temp_files(tmp_path)) == count
    assert found(backend, [1], 8 << 20) == [True]
    assert [one.stored_bytes for one in backend.scan("")] == [64 + (8 << 20)]
    backend.clear()
    assert len(temp_files(tmp_path)) == 3, "clearing removed files that aren't pages"
    opened(tmp_path, temp_age_s=0.0).close()
    assert temp_files(tmp_path) == []


LIVES = """
from hicache_storage.backends.file import transfer
backend = opened(sys.argv[1])
real = transfer.put_in_place
def wait(*args):
    print("writing", flush=True)
    sys.stdin.readline()
    return real(*args)
transfer.put_in_place = wait
print(store(backend, [1], 1 << 20))
"""


def test_a_live_writer_s_file_is_kept_however_old_and_a_dead_one_s_however_young(
    tmp_path: Path,
) -> None:
    opened(tmp_path).close()
    with Child(LIVES, tmp_path) as child:
        assert child.line() == "writing"
        (temp,) = temp_files(tmp_path)
        os.utime(temp, (0, 0))
        writers = tmp_path / ".hicache-storage/writers"
        (writers / ("d" * 16)).write_bytes(b"")  # of one that died, so that there is a sweep
        (temp.parent / f".{'d' * 16}-0.tmp").write_bytes(b"")
        for path in writers.iterdir():
            os.utime(path, (0, 0))
        opened(tmp_path, temp_age_s=0.0).close()
        assert temp_files(tmp_path) == [temp]
        child.tell()
        assert child.end() == "[True]\n"
    with Child(DIE_BEFORE_RENAME, tmp_path, 2) as child:
        child.process.wait(60)
    opened(tmp_path, temp_age_s=3600.0).close()
    assert len(temp_files(tmp_path)) == 1, "a young file of a dead writer was removed"
    assert found(opened(tmp_path, temp_age_s=0.0), [1], 1 << 20) == [True]
    assert temp_files(tmp_path) == []
    assert list((tmp_path / ".hicache-storage/writers").iterdir()) != []  # ours, open


def test_files_that_only_look_like_ours_are_not_swept(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert store(opened(tmp_path), [1]) == [True]
    shard = path_of(tmp_path, 1).parent
    foreign = [
        shard / ".tmp",
        shard / ".0123456789abcdef-1.tmp.bak",
        shard / "0123456789abcdef-1.tmp",
        shard / ".0123456789ABCDEF-1.tmp",
        tmp_path / ".0123456789abcdef-1.tmp",
        tmp_path / ".hicache-storage/writers/notes",
    ]
    for path in foreign:
        path.write_bytes(b"mine")
        os.utime(path, (0, 0))
    dead = tmp_path / ".hicache-storage/writers" / ("d" * 16)
    dead.write_bytes(b"")
    os.utime(dead, (0, 0))
    orphan = shard / f".{'d' * 16}-3.tmp"
    orphan.write_bytes(b"".join(page(1)))
    os.utime(orphan, (0, 0))
    opened(tmp_path, temp_age_s=0.0).close()
    assert [path for path in foreign if path.read_bytes() != b"mine"] == []
    assert not orphan.exists()
    assert not dead.exists()
