"""The measurements behind four choices of lmdb://.

    python benchmarks/lmdb_choices.py [--directory DIR] [--rounds N]

- layout: a page as one value (header and payload gathered into one buffer first), against a record
  with the header and the payload's last bytes, and a body that is written from where it lies;
- commit: how many bytes one commit takes, with and without waiting for the disk;
- copy: assigning to a slice (keeps the interpreter lock), against memmove (frees it); how fast, and
  how much another thread gets done meanwhile;
- cold: reads of pages that are not in memory, of runs of 128 and of 16 single ones at random: read
  past the map after all places were announced, or through the map, with and without the kernel's
  read-ahead for maps (of `read_ahead_kb`, which the results name).

Medians over rounds whose order alternates. Results go to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

import lmdb  # noqa: E402
import lmdb_report  # noqa: E402
from lmdb_backend import BATCH, KIB, MIB, Pages, keys  # noqa: E402

from hicache_storage.backends.lmdb import (  # noqa: E402
    LmdbBackend,
    LmdbConfig,
    bodies,
    copying,
    writing,
)

SIZES = (16 * KIB, 64 * KIB, MIB)


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def medians(sides: dict[Any, Callable[[int], float]], rounds: int) -> dict[Any, float]:
    """Runs every side once a round, the order turning; the first round warms up."""
    took: dict[Any, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            took_s = sides[name](number)
            if number:
                took[name].append(took_s)
    return {name: statistics.median(values) for name, values in took.items()}


# -- layout --------------------------------------------------------------------------------------


def layout(scratch: Path, size: int, rounds: int) -> dict[str, Any]:
    """GB/s of writes, and bytes of the file for each byte of payload."""
    pages = Pages(size)
    tail = (size + 16) % 4096
    buffer = memoryview(bytearray(64 + size))
    handles = {
        name: lmdb.open(
            str(scratch / name), map_size=32 << 30, max_dbs=2, sync=False, metasync=False
        )
        for name in ("one value", "record and body")
    }
    trees = {name: [h.open_db(b"a"), h.open_db(b"b")] for name, h in handles.items()}
    at_once = max(1, writing.ASYNC_COMMIT_BYTES // size)

    def one_value(number: int) -> float:
        names = [key.encode() for key in keys(number * BATCH)]
        tree = trees["one value"][0]

        def write() -> None:
            for start in range(0, BATCH, at_once):
                with handles["one value"].begin(write=True) as txn:
                    for i in range(start, min(start + at_once, BATCH)):
                        header, body = pages.spans[i]
                        buffer[:64] = header
                        copying.copy(buffer[64:], body)
                        txn.put(names[i], buffer, db=tree)

        return seconds(write)

    def record_and_body(number: int) -> float:
        names = [key.encode() for key in keys(number * BATCH)]
        records, bodies = trees["record and body"]

        def write() -> None:
            for start in range(0, BATCH, at_once):
                with handles["record and body"].begin(write=True) as txn:
                    for i in range(start, min(start + at_once, BATCH)):
                        header, body = pages.spans[i]
                        place = (number * BATCH + i).to_bytes(8, "big")
                        end = size - tail
                        txn.put(names[i], b"".join((place, header, body[end:])), db=records)
                        txn.put(place, body[:end], db=bodies, append=True)

        return seconds(write)

    found = medians({"one value": one_value, "record and body": record_and_body}, rounds)
    written = size * BATCH * (rounds + 1)
    row: dict[str, Any] = {"page_bytes": size}
    for name, took_s in found.items():
        handles[name].close()
        row[f"{name} gbs"] = size * BATCH / took_s / 1e9
        row[f"{name} file"] = (scratch / name / "data.mdb").stat().st_size / written
        shutil.rmtree(scratch / name)
    return row


# -- commit --------------------------------------------------------------------------------------


def commit(scratch: Path, size: int, durability: Any, rounds: int) -> dict[str, Any]:
    """GB/s of batches written in commits of so many MiB."""
    pages = Pages(size)
    backend = LmdbBackend(LmdbConfig(str(scratch / "commit"), durability=durability))
    backend.open()
    steps = [most for most in (1, 2, 4, 8, 16, 32, 64, 128) if most * MIB <= 2 * size * BATCH]
    before = writing.ASYNC_COMMIT_BYTES, writing.SYNC_COMMIT_BYTES
    count = iter(range(10**9))

    def write(most: int) -> float:
        writing.ASYNC_COMMIT_BYTES = writing.SYNC_COMMIT_BYTES = most * MIB
        names = keys(next(count) * BATCH)
        return seconds(lambda: backend.batch_set(names, pages.spans))

    found = medians({most: lambda _, most=most: write(most) for most in steps}, rounds)
    writing.ASYNC_COMMIT_BYTES, writing.SYNC_COMMIT_BYTES = before
    backend.close()
    shutil.rmtree(scratch / "commit")
    rates = {f"{most} MiB": size * BATCH / took_s / 1e9 for most, took_s in found.items()}
    return {"page_bytes": size, "durability": durability, **rates}


# -- copy ----------------------------------------------------------------------------------------


def copy(size: int, rounds: int) -> dict[str, Any]:
    """GB/s of copies of that size, and the share of its own speed that another thread keeps."""
    count = max(1, 32 * MIB // size)
    sources = [memoryview(bytearray(random.randbytes(min(size, MIB)) * (-(-size // MIB))))[:size]]
    targets = [memoryview(bytearray(size)) for _ in range(count)]

    def assign() -> None:
        for target in targets:
            target[:] = sources[0]

    def move() -> None:
        for target in targets:
            copying.copy(target, sources[0])

    before = copying.UNLOCKED_BYTES
    copying.UNLOCKED_BYTES = 0
    try:
        sides = {"slice": assign, "memmove": move}
        found = medians({name: lambda _, f=f: seconds(f) for name, f in sides.items()}, rounds)
        alone = beside(lambda: time.sleep(0.2))
        row: dict[str, Any] = {"page_bytes": size}
        for name, call in sides.items():

            def repeated(call: Callable[[], None] = call) -> None:
                until_s = time.monotonic() + 0.2
                while time.monotonic() < until_s:
                    call()

            shares = [beside(repeated) / alone for _ in range(rounds)]
            row[f"{name} gbs"] = size * count / found[name] / 1e9
            row[f"{name} other thread"] = statistics.median(shares)
        return row
    finally:
        copying.UNLOCKED_BYTES = before


def beside(call: Callable[[], None]) -> float:
    """Rounds a second that a counting thread makes while `call` runs."""
    stop, counted = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    took_s = seconds(call)
    stop.set()
    thread.join()
    return counted[0] / took_s


# -- cold ----------------------------------------------------------------------------------------


def cold(scratch: Path, size: int, rounds: int) -> dict[str, Any]:
    """Microseconds a page of cold reads: of 128 pages as they were written, of 16 at random."""
    pages, batches = Pages(size), max(4, 256 * MIB // (size * BATCH))
    path = scratch / "cold"
    backend = LmdbBackend(LmdbConfig(str(path), durability="async"))
    backend.open()
    for number in range(batches):
        backend.batch_set(keys(number * BATCH), pages.spans)
    backend.close()
    names = [key for number in range(batches) for key in keys(number * BATCH)]
    resident, opener = bodies.resident, lmdb.open

    def read(way: str, kind: str) -> float:
        start = random.randrange(batches) * BATCH
        chosen = names[start : start + BATCH] if kind == "run" else random.sample(names, 16)
        fd = os.open(path / "data.mdb", os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        if way != "announced":
            bodies.resident = lambda fd, place: True
            lmdb.open = partial(_open_with, opener, way == "map, kernel ahead")
        try:
            backend = LmdbBackend(LmdbConfig(str(path), durability="async"))
            backend.open()
            took_s = seconds(lambda: backend.batch_get(chosen, pages.spans[: len(chosen)]))
            backend.close()
        finally:
            bodies.resident, lmdb.open = resident, opener
        return took_s / len(chosen)

    sides: dict[Any, Callable[[int], float]] = {
        f"{kind}: {way}": lambda _, way=way, kind=kind: read(way, kind)
        for kind in ("run", "single")
        for way in ("announced", "map, kernel ahead", "map alone")
    }
    found = medians(sides, rounds)
    shutil.rmtree(path)
    return {"page_bytes": size, **{f"{name} us": took_s * 1e6 for name, took_s in found.items()}}


def _open_with(opener: Callable[..., Any], ahead: bool, path: str, **options: Any) -> Any:
    return opener(path, **{**options, "readahead": ahead})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", help="where to write the pages; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default 9)")
    parser.add_argument("--note", default="", help="how it was run, for the report")
    parser.add_argument("--only", default="", help="layout, commit, copy or cold")
    parser.add_argument("--results", default=str(REPOSITORY / "benchmarks" / "results"))
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="lmdb-choices-", dir=options.directory))
    rounds, found = options.rounds, {}
    lmdb_report.settle_allocator()
    load = [os.getloadavg()[0]]
    try:
        parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "layout": lambda: [layout(scratch, size, rounds) for size in SIZES],
            "commit": lambda: [
                commit(scratch, size, durability, rounds)
                for durability in ("async", "ordered")
                for size in SIZES
            ],
            "copy": lambda: [copy(size, rounds) for size in (4 * KIB, *SIZES, 256 * KIB, 4 * MIB)],
            "cold": lambda: [cold(scratch, size, rounds) for size in SIZES],
        }
        for name, part in parts.items():
            if not options.only or options.only == name:
                found[name] = part()
                print(lmdb_report.table(name, found[name]), flush=True)
                load.append(os.getloadavg()[0])
        if not options.only:
            lmdb_report.write_tables(options, "lmdb_choices", found, scratch, load)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
