"""How fast lmdb:// writes, finds and reads pages, beside file:// in the same directory.

    python benchmarks/lmdb_backend.py [--directory DIR] [--rounds N] [--warm] [--name NAME]

Both backends are called without Store, so without checksums, on pages with ready-made headers.
A batch is 128 pages. In each round both do the same, in an order that alternates; the figures are
medians over rounds, the ratio is the median of each round's own ratio with its quartiles. The
processor's time (of the process, user and system) is given too: other work on the machine
changes it less.

- write: new pages, nothing waits for the disk (lmdb durability=async, file durability=none);
- durable write: each batch reaches the disk (ordered and sync; fsync);
- warm read: what was just written, from the page cache; into one span a page, or into 64;
- cold read: of what was written long before; see `evict` for how it is made cold, and the column
  `resident` for how much of it was in memory nevertheless, as mincore says;
- lookup: `exists` of the 128 pages.

Results go to `benchmarks/results/`.

In a virtual machine run it in a memory cgroup of 1.5 GB, so that the page cache reuses its
memory: a page that was given back to the host costs ten times as much to get as to write. As
directory give it a fresh ext4 (of a file, by a loop device with direct I/O), where no inode was
freed lately.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

import lmdb_report  # noqa: E402
from lmdb_report import Seconds  # noqa: E402

from hicache_storage.backends.file import FileBackend, FileConfig  # noqa: E402
from hicache_storage.backends.lmdb import LmdbBackend, LmdbConfig  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
BATCH = 128
SIZES = (16 * KIB, 64 * KIB, MIB)
COLD_BATCHES = {16 * KIB: 24, 64 * KIB: 12, MIB: 4}
"""Batches stored before the cold reads, one of which is read a round."""
DIGEST = "0123456789abcdef" * 2
DURABILITY = {"none": ("async", "none"), "ordered": ("ordered", "fsync"), "sync": ("sync", "fsync")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", help="where to write the pages; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default 15)")
    parser.add_argument("--note", default="", help="how it was run, for the report")
    parser.add_argument("--name", default="lmdb_backend", help="name of the result files")
    parser.add_argument("--warm", action="store_true", help="no cold reads, no waits for the disk")
    parser.add_argument("--quick", action="store_true", help="three rounds, to see that it runs")
    parser.add_argument("--results", default=str(REPOSITORY / "benchmarks" / "results"))
    options = parser.parse_args()
    if options.quick:
        options.rounds = 3
    return options


class Side:
    """One of the two backends, over a directory of its own."""

    def __init__(self, name: str, directory: Path, durability: str) -> None:
        self.name = name
        self.directory = directory / name
        lmdb_durability, file_durability = DURABILITY[durability]
        self._make: Callable[[], Any] = (
            (lambda: LmdbBackend(LmdbConfig(str(self.directory), durability=lmdb_durability)))
            if name == "lmdb"
            else (lambda: FileBackend(FileConfig(str(self.directory), durability=file_durability)))
        )
        self.open()
        if name == "file":
            # A store in use has all its directories; a new namespace pays for them once.
            for shard in range(256):
                (self.directory / DIGEST / f"{shard:02x}").mkdir(parents=True, exist_ok=True)

    def open(self) -> None:
        self.backend = self._make()
        self.backend.open()

    def evict(self) -> float:
        """Makes the pages cold: written back, closed (mapped memory can't be dropped), then
        posix_fadvise DONTNEED on every file. The share that is in memory all the same."""
        self.backend.close()
        for path in self.files():
            fd = os.open(path, os.O_RDWR)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        resident = lmdb_report.resident(self.files())
        self.open()
        return resident

    def files(self) -> list[str]:
        return [
            os.path.join(folder, name)
            for folder, _, names in os.walk(self.directory)
            for name in names
            if name == "data.mdb" or DIGEST in folder
        ]


def keys(first: int) -> list[str]:
    return [
        f"{DIGEST}/{hashlib.sha256(f'{os.getpid()} {first + i}'.encode()).hexdigest()}"
        for i in range(BATCH)
    ]


class Pages:
    """A batch of pages in memory: header and payload, the payload in `parts` spans."""

    def __init__(self, size: int, parts: int = 1) -> None:
        self._memory = [bytearray(random.randbytes(size)) for _ in range(BATCH)]
        self.spans: list[tuple[memoryview, ...]] = []
        step = size // parts
        for memory in self._memory:
            view, header = memoryview(memory), memoryview(bytearray(random.randbytes(64)))
            self.spans.append((header, *(view[i : i + step] for i in range(0, size, step))))

    def digest(self) -> str:
        whole = hashlib.blake2b()
        for memory in self._memory:
            whole.update(memory)
        return whole.hexdigest()

    def wipe(self) -> None:
        for memory in self._memory:
            memory[:] = bytes(len(memory))


def timed(call: Callable[[], Any], right: Any) -> Seconds:
    started, started_cpu = time.perf_counter(), time.process_time()
    answer = call()
    took = Seconds(time.perf_counter() - started, time.process_time() - started_cpu)
    if answer != right:
        raise SystemExit("a page was refused or missed: the directory may be full")
    return took


def ordered(sides: list[Side], number: int) -> list[Side]:
    return sides if number % 2 else sides[::-1]


def measure_write(scratch: Path, size: int, durability: str, rounds: int) -> list[dict[str, Any]]:
    """Writes of new pages, then reads of them and lookups while they are warm."""
    sides = [Side(name, scratch, durability) for name in ("lmdb", "file")]
    pages, scattered = Pages(size), Pages(size, 64)
    content, all_true = pages.digest(), [True] * BATCH
    took: lmdb_report.Took = {}
    reads = durability == "none"
    for number in range(rounds + 1):
        names = keys(number * BATCH)
        found: list[tuple[str, Side, Seconds]] = []
        for side in ordered(sides, number):
            call = partial(side.backend.batch_set, names, pages.spans)
            found.append(("write", side, timed(call, all_true)))
        for side in ordered(sides, number) if reads else ():
            pages.wipe()
            call = partial(side.backend.batch_get, names, pages.spans)
            found.append(("warm read", side, timed(call, all_true)))
            if pages.digest() != content:
                raise SystemExit(f"{side.name} read other bytes than it wrote")
            call = partial(side.backend.batch_get, names, scattered.spans)
            found.append(("warm read, 64 spans", side, timed(call, all_true)))
            found.append(("lookup", side, timed(partial(side.backend.exists, names), BATCH)))
        if number:  # the first round warms up
            for verb, side, seconds in found:
                took.setdefault(verb, {}).setdefault(side.name, []).append(seconds)
        os.sync()  # what piled up is not the next round's affair
    for side in sides:
        side.backend.close()
        shutil.rmtree(side.directory)
    if not reads:
        took = {f"write, {durability}": took["write"]}
    return lmdb_report.rows(took, size, BATCH)


def measure_cold(scratch: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    """Reads of pages that are not in memory: of a run in the order in which it was written."""
    sides = [Side(name, scratch, "none") for name in ("lmdb", "file")]
    pages, batches, all_true = Pages(size), COLD_BATCHES[size], [True] * BATCH
    for batch in range(batches):
        names = keys(batch * BATCH)
        for side in sides:
            timed(partial(side.backend.batch_set, names, pages.spans), all_true)
    took: lmdb_report.Took = {"cold read": {}}
    resident: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        names = keys(random.randrange(batches) * BATCH)
        for side in ordered(sides, number):
            share = side.evict()
            pages.wipe()
            seconds = timed(partial(side.backend.batch_get, names, pages.spans), all_true)
            if number:
                took["cold read"].setdefault(side.name, []).append(seconds)
                resident.setdefault(side.name, []).append(share)
    for side in sides:
        side.backend.close()
        shutil.rmtree(side.directory)
    rows = lmdb_report.rows(took, size, BATCH)
    rows[0]["resident"] = {name: max(shares) for name, shares in resident.items()}
    return rows


def main() -> None:
    options = arguments()
    scratch = Path(tempfile.mkdtemp(prefix="lmdb-backend-", dir=options.directory))
    rows: list[dict[str, Any]] = []
    lmdb_report.settle_allocator()
    load = [os.getloadavg()[0]]
    try:
        for size in SIZES:
            for durability in ["none"] if options.warm else DURABILITY:
                rows += measure_write(scratch, size, durability, options.rounds)
            if not options.warm:
                rows += measure_cold(scratch, size, options.rounds)
            lmdb_report.show([row for row in rows if row["page_bytes"] == size])
            load.append(os.getloadavg()[0])
        lmdb_report.write(options, options.name, rows, scratch, load)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
