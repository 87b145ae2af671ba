"""What the depth of a page store's directories costs, on the file system at hand.

    python benchmarks/file_fanout.py DIRECTORY [PAGES]

Makes as many empty files as asked, in one directory, in 256, in 4096 and in 65536, and times
making them (first while the tree grows, then in the tree as it is), looking them up, and walking
over all; also what the directories take. The choice of `backends/file/names.py`
rests on this.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hicache_storage.backends.mounts import file_system


def tree(levels: tuple[int, ...], digest: str) -> str:
    parts, start = [], 0
    for width in levels:
        parts.append(digest[start : start + width])
        start += width
    return "/".join(parts)


def make(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def timed(call: Callable[[str], object], items: list[str]) -> float:
    """Microseconds a call, the mean without the slowest twentieth: the disk's work comes in
    bursts."""
    took = []
    for item in items:
        start = time.perf_counter()
        call(item)
        took.append(time.perf_counter() - start)
    return statistics.mean(sorted(took)[: len(took) * 19 // 20]) * 1e6


def walk(path: str) -> tuple[int, int]:
    """Files under the path, and bytes that its directories take."""
    files, used = 0, os.stat(path).st_blocks * 512
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                more, size = walk(entry.path)
                files, used = files + more, used + size
            else:
                entry.stat(follow_symlinks=False)
                files += 1
    return files, used


def measure(root: str, levels: tuple[int, ...], pages: int) -> None:
    pick = random.Random(1)
    os.mkdir(root)

    def grow(digest: str) -> None:
        directory = f"{root}/{tree(levels, digest)}"
        try:
            make(f"{directory}/{digest}")
        except FileNotFoundError:
            os.makedirs(directory, exist_ok=True)
            make(f"{directory}/{digest}")

    digests = [f"{pick.getrandbits(256):064x}" for _ in range(pages)]
    first = timed(grow, digests[:2000])
    timed(grow, digests[2000:])
    os.sync()
    more = [f"{pick.getrandbits(256):064x}" for _ in range(2000)]
    later = timed(grow, more)
    look = timed(lambda d: bool(os.stat(f"{root}/{tree(levels, d)}/{d}")), digests[::40])
    start = time.perf_counter()
    count, used = walk(root)
    walked = (time.perf_counter() - start) / count * 1e6
    cells = [str(16 ** sum(levels)), f"{first:.0f}", f"{later:.0f}", f"{look:.1f}", f"{walked:.1f}"]
    print(f"| {' | '.join([*cells, str(used >> 20)])} |", flush=True)
    os.sync()


def main() -> None:
    directory = sys.argv[1]
    pages = int(sys.argv[2]) if len(sys.argv) > 2 else 200_000
    kind = file_system(directory)
    print("# Directories of a page store\n")
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, {kind}\n")
    print(f"    python benchmarks/file_fanout.py DIRECTORY {pages}\n")
    print(f"{pages} empty files; microseconds a file, MiB that the directories take.\n")
    print("| directories | make, first 2000 | make, later | look up | walk | MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    scratch = tempfile.mkdtemp(prefix="fanout-", dir=directory)
    try:
        for levels in ((2, 2), (2, 1), (2,), ()):
            measure(f"{scratch}/{len(levels)}-{sum(levels)}", levels, pages)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
