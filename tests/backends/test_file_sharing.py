"""Threads, processes and forked children that share a root."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from backends.children import TESTS, WAIT_S
from backends.file_rig import (
    Child,
    found,
    key,
    opened,
    page,
    payload,
    store,
    stored_bytes,
    stored_bytes_at_once,
    temp_files,
)

MIB = 1 << 20

OPEN_TOGETHER = """
print("ready", flush=True)
sys.stdin.readline()
backend = opened(sys.argv[1], capacity=1 << 20)
number = int(sys.argv[2])
assert store(backend, [number, 100]) == [True, True]
assert found(backend, [number, 100]) == [True, True]
print(len(os.listdir("/proc/self/fd")))
"""


def test_sixteen_processes_may_open_a_missing_nested_root_at_once(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "c"
    children = [Child(OPEN_TOGETHER, root, number) for number in range(16)]
    for child in children:
        assert child.line() == "ready"
    for child in children:
        child.tell()
    for child in children:
        child.end()
    assert found(opened(root), [*range(16), 100]) == [True] * 17


@pytest.mark.parametrize("size", [MIB, 8 * MIB])
def test_a_page_read_while_it_is_rewritten_is_one_of_the_two_or_missing(
    tmp_path: Path, size: int
) -> None:
    """One writer, four readers; the reads are checked byte by byte."""
    backend = opened(tmp_path)
    contents = [b"\x00" * size, b"\xff" * size]
    frames = [(memoryview(bytes(64)), memoryview(content)) for content in contents]
    stop, failures, reads = threading.Event(), [], Counter[int]()

    def read() -> None:
        buffers = (memoryview(bytearray(64)), memoryview(bytearray(size)))
        while not stop.is_set() or not reads[0]:
            if backend.batch_get([key(1)], [buffers]) == [True]:
                if buffers[1] not in contents:
                    failures.append(bytes(buffers[1][:16]))
                reads[0] += 1

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    end_s = time.monotonic() + 1.5
    while time.monotonic() < end_s:
        for frame in frames:
            assert backend.batch_set([key(1)], [frame]) == [True]
    stop.set()
    for reader in readers:
        reader.join(WAIT_S)
    assert not failures
    assert reads[0] > 4


REWRITE = """
import itertools
backend = opened(sys.argv[1])
frames = [(memoryview(bytes(64)), memoryview(bytes([byte]) * (8 << 20))) for byte in (0, 255)]
for frame in itertools.cycle(frames):
    backend.batch_set([key(1)], [frame])
    print("written", flush=True)
"""


def test_a_writer_of_the_same_page_may_be_killed_again_and_again(tmp_path: Path) -> None:
    """Another process reads all the time: 8 MiB of one byte or of the other."""
    backend, size = opened(tmp_path), 8 * MIB
    buffers = (memoryview(bytearray(64)), memoryview(bytearray(size)))
    for number in range(8):
        with Child(REWRITE, tmp_path) as child:
            child.line()
            for _ in range(4):
                assert backend.batch_get([key(1)], [buffers]) == [True]
                assert buffers[1] in (bytes(size), b"\xff" * size)
            time.sleep(0.003 * number)
            child.kill()
        assert backend.batch_get([key(1)], [buffers]) == [True]
        assert buffers[1] in (bytes(size), b"\xff" * size)


def run_mix(tmp_path: Path, seconds: float) -> Counter[str]:
    """Four processes with four threads each; what they counted."""
    capacity = 3_000_000
    opened(tmp_path, capacity=capacity).close()
    paths = os.pathsep.join([*filter(None, sys.path), str(TESTS)])
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(TESTS / "backends/file_mix.py"),
                *map(str, (tmp_path, seed, seconds, 4, capacity)),
            ],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    counts: Counter[str] = Counter()
    most = 0
    while any(process.poll() is None for process in processes):
        pids = [process.pid for process in processes if process.poll() is None]
        most = max(most, stored_bytes_at_once(tmp_path, pids))
        time.sleep(0.1)
    for process in processes:
        output, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors
        counts.update(ast.literal_eval(output.splitlines()[-1]))
    assert most <= capacity
    assert temp_files(tmp_path) == []
    return counts


def test_four_processes_of_four_threads_mix_all_calls_under_a_capacity(tmp_path: Path) -> None:
    counts = run_mix(tmp_path, 4.0)
    assert counts["stored"] > 200, counts
    assert counts["read"] > 200, counts
    assert counts["missed"] > 0, counts
    assert counts["refused"] < counts["stored"] / 10, counts


@pytest.mark.slow
def test_the_same_for_a_minute(tmp_path: Path) -> None:
    counts = run_mix(tmp_path, 60.0)
    print(dict(counts))
    assert counts["stored"] > 3000, counts


# -- forks ---------------------------------------------------------------------------------------


def in_child(work: Any) -> None:
    """Runs `work` in a forked child, which must end well."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end_s = time.monotonic() + WAIT_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the child hung")
        time.sleep(0.01)
    assert ended[1] == 0


@pytest.mark.parametrize("options", [{}, {"io_threads": 4}, {"capacity": 200_000}])
def test_a_forked_child_goes_on_with_threads_and_files_of_its_own(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    backend = opened(tmp_path, **options)
    assert all(store(backend, range(300)))  # with a capacity the evictor runs by now
    parent = backend._session
    assert parent is not None

    def work() -> None:
        assert all(store(backend, range(300, 600)))
        assert found(backend, range(598, 600)) == [True, True]
        session = backend._session
        assert session is not None
        assert session is not parent
        assert session.temp_name()[:17] != parent.temp_name()[:17]
        backend.close()

    in_child(work)
    assert backend._session is parent
    assert all(store(backend, range(600, 700)))
    assert found(backend, [699]) == [True]
    assert stored_bytes(tmp_path) <= options.get("capacity", 1 << 30)


def test_a_fork_while_other_threads_are_in_the_middle_of_everything_hangs_nobody(
    tmp_path: Path,
) -> None:
    """Locks that are held at that moment stay locked in the child; it must not use them."""
    backend = opened(tmp_path, capacity=100_000, recency_s=0.0)
    stop, failures = threading.Event(), []

    def busy(seed: int) -> None:
        number = seed * 1000
        try:
            while not stop.is_set():
                store(backend, range(number, number + 4))
                found(backend, range(number - 8, number + 4))
                backend.batch_get([f"{'0' * 32}/{'0' * 64}"], [page(1)])
                backend._session.failures.note("busy", "x")  # type: ignore[union-attr]
                number += 4
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=busy, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(20):
            time.sleep(0.01)

            def work(turn: int = turn) -> None:
                first = 100_000 + turn * 100
                assert all(store(backend, range(first, first + 50)))
                assert found(backend, [first + 49]) == [True]

            in_child(work)
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert not failures
    assert stored_bytes(tmp_path) <= 100_000


def test_a_child_that_only_inherits_a_store_keeps_no_lock_of_its_parent(tmp_path: Path) -> None:
    """The parent dies; the child, which never used the store, lives on. What the parent left is
    swept and others can evict."""
    source = """
    backend = opened(sys.argv[1], capacity=100_000)
    store(backend, range(10))
    if os.fork() == 0:
        print("child", flush=True)
        time.sleep(60)
        os._exit(0)
    from hicache_storage.backends.file import transfer
    transfer.put_in_place = lambda *_: os.kill(os.getpid(), 9)
    store(backend, [1], version=1)
    """
    with Child(source, tmp_path) as child:
        assert child.line() == "child"
        assert child.process.wait(WAIT_S) == -signal.SIGKILL
        assert len(temp_files(tmp_path)) == 1
        backend = opened(tmp_path, capacity=100_000, temp_age_s=0.0)
        assert temp_files(tmp_path) == []
        assert all(store(backend, range(100, 400)))
        backend.close()


def test_closing_a_store_in_the_child_leaves_the_parent_s_open(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    assert store(backend, [1]) == [True]
    in_child(backend.close)
    assert store(backend, [2]) == [True]
    assert found(backend, [1, 2]) == [True, True]
    assert payload(1, 512) != payload(2, 512)
