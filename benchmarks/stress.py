"""Several processes and threads use one store at once, and every byte of every answer is checked.

    python benchmarks/stress.py URL [--processes 4] [--threads 4] [--seconds 60]

Each thread sets, reads, looks up and deletes random batches: half of them of keys of its own,
half of keys that all share. A page tells which write it comes from, in every byte. Wrong are:

- bytes that are not exactly one write of that key, or bytes outside of the buffers;
- a page of the thread's own keys that isn't its newest write, or that it had deleted;
- where nothing may be evicted: a page of its own that was acknowledged and is missing;
- more pages than the capacity, in `usage` at any time (beyond `--slack`) or in the end;
- a process that dies or stands still, and an error that is no BackendError.

The exit status is 1 if anything is wrong, and the result is one row of a Markdown table.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import multiprocessing
import random
import struct
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hicache_storage import BackendError, Namespace, Store, open_store
from hicache_storage.cli.output import size
from hicache_storage.cli.stores import shown_url
from hicache_storage.config import parse_size

STAMP = struct.Struct("<QQQQ")  # key, process, thread, number of the write; 0 for shared keys
GUARD = b"\xa5" * 64
STUCK_S = 60.0
MOST_PAGES = 16
SHAPES = ((2, 64), (1, 64))  # layers and head_dim of the target's and the draft's pages


def namespaces(tenant: str = "") -> list[Namespace]:
    """Pages of 64 KiB and of 32 KiB; a tenant for each run, whatever the store held before."""
    return [
        Namespace(
            model=f"stress-{layers}", pool="mha", dtype="bfloat16", page_size=16, layers=layers,
            heads=8, head_dim=dim, v_head_dim=dim, order="layer_token",
            page_bytes=2 * layers * 16 * 8 * dim * 2, tenant=tenant,
        )
        for layers, dim in SHAPES
    ]  # fmt: skip


def page(stamp: bytes, page_bytes: int) -> bytes:
    """The stamp, and after it bytes that follow from it and from their place."""
    return stamp + hashlib.shake_128(stamp).digest(page_bytes - len(stamp))


@dataclass
class Tally:
    """What one thread did and found."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)

    def found(self, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 5:
            self.wrong.append(what)


class Worker:
    """One thread: its own keys, its share of the common ones, and what it knows of them."""

    def __init__(
        self, store: Store, process: int, thread: int, keys: int, evicts: bool, tenant: str = ""
    ) -> None:
        self.store, self.process, self.thread, self.evicts = store, process, thread, evicts
        self.random = random.Random(f"{process} {thread}")
        self.spaces = namespaces(tenant)
        first = 1_000_000 * (1 + process * 1000 + thread)
        self.own = range(first, first + keys)
        self.shared = range(keys)
        self.writes = 0
        self.tally = Tally()
        # Writes that a key of its own may hold, 0 for none; what was never written is none.
        self.may_hold: dict[tuple[int, int], set[int]] = {}

    def run(self, end_s: float, beat: Synchronized[int]) -> None:
        verbs = (self.set, self.get, self.look_up, self.delete)
        while time.monotonic() < end_s:
            verb = self.random.choices(verbs, (40, 45, 10, 5))[0]
            own = self.random.random() < 0.5
            space = self.random.randrange(len(self.spaces))
            count = self.random.randint(1, MOST_PAGES)
            numbers = self.random.sample(self.own if own else self.shared, count)
            try:
                verb(space, numbers, own)
            except BackendError as error:
                self.tally.errors[f"{verb.__name__}: {type(error).__name__}"] += 1
            self.tally.counts["calls"] += 1
            with beat.get_lock():
                beat.value += 1

    def set(self, space: int, numbers: list[int], own: bool) -> None:
        stamps = []
        for number in numbers:
            self.writes += 1
            stamps.append(STAMP.pack(number, self.process, self.thread, self.writes))
            if own:
                self.may_hold.setdefault((space, number), {0}).add(self.writes)
        namespace = self.spaces[space]
        pages = [page(stamp, namespace.page_bytes) for stamp in stamps]
        for number, stamp, done in zip(
            numbers, stamps, self.store.batch_set(namespace, names(numbers), pages), strict=True
        ):
            self.tally.counts["set"] += done
            self.tally.counts["refused"] += not done
            if own and done:
                self.may_hold[space, number] = {STAMP.unpack(stamp)[3]}

    def get(self, space: int, numbers: list[int], own: bool) -> None:
        namespace = self.spaces[space]
        rooms = [bytearray(GUARD + bytes(namespace.page_bytes) + GUARD) for _ in numbers]
        buffers = [memoryview(room)[len(GUARD) : -len(GUARD)] for room in rooms]
        hits = self.store.batch_get(namespace, names(numbers), buffers)
        for number, room, buffer, hit in zip(numbers, rooms, buffers, hits, strict=True):
            self.tally.counts["hit" if hit else "missed"] += 1
            if not (room.startswith(GUARD) and room.endswith(GUARD)):
                self.tally.found(f"bytes round the buffer of key {number} were written")
            if not hit:
                self.check_missing(space, number, own)
                continue
            stamp = bytes(buffer[: STAMP.size])
            key, process, thread, write = STAMP.unpack(stamp)
            if key != number or buffer != page(stamp, namespace.page_bytes):
                self.tally.found(f"key {number} gave a page that nobody wrote: {stamp.hex()}")
            elif own and (process, thread) != (self.process, self.thread):
                self.tally.found(f"key {number} gave a page of another thread")
            elif own and write not in self.may_hold.get((space, number), {0}):
                self.tally.found(f"key {number} gave write {write}, which isn't its newest")

    def look_up(self, space: int, numbers: list[int], own: bool) -> None:
        run = self.store.exists(self.spaces[space], names(numbers))
        if not own:
            return
        for i, number in enumerate(numbers[:run]):
            if self.may_hold.get((space, number), {0}) == {0}:
                self.tally.found(f"key {number} is found at {i} of {run}, and was deleted")
        if run < len(numbers):
            self.check_missing(space, numbers[run], own)

    def delete(self, space: int, numbers: list[int], own: bool) -> None:
        if own:
            for number in numbers:
                self.may_hold.setdefault((space, number), {0}).add(0)
        gone = self.store.delete(self.spaces[space], names(numbers))
        for number, done in zip(numbers, gone, strict=True):
            self.tally.counts["deleted"] += done
            if own and done:
                self.may_hold[space, number] = {0}

    def check_missing(self, space: int, number: int, own: bool) -> None:
        """A page of its own may be missing only if it was deleted, refused or evicted."""
        if own and not self.evicts and 0 not in self.may_hold.get((space, number), {0}):
            self.tally.counts["lost"] += 1
            self.tally.found(f"key {number} was acknowledged and is missing")


def names(numbers: list[int]) -> list[str]:
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in numbers]


def work(options: Any, process: int, evicts: bool, beat: Any, start: Any, results: Any) -> None:
    """One process: opens the store itself, runs its threads, puts what they found."""
    every = max(options.working_set // sum(space.page_bytes for space in namespaces()), 1)
    keys = max(every // (options.processes * options.threads + 1), MOST_PAGES)
    unexpected: list[str] = []
    with open_store(options.url) as store:
        workers = [
            Worker(store, process, i, keys, evicts, options.tenant) for i in range(options.threads)
        ]
        start.wait()
        end_s = time.monotonic() + options.seconds

        def run(worker: Worker) -> None:
            try:
                worker.run(end_s, beat)
            except BaseException as error:
                unexpected.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        corrupt = store.counts.corrupt_pages
    results.put(([worker.tally for worker in workers], corrupt, unexpected))


@dataclass
class Watch:
    """What the parent sees of the store and of the processes."""

    capacity: int | None
    highest: int = 0
    """Most bytes that `usage` told of."""
    samples: int = 0
    left: int = 0
    """Bytes of all pages listed after the end."""
    dead: list[str] = field(default_factory=list)

    def sample(self, store: Store) -> None:
        if self.capacity is not None:
            self.highest = max(self.highest, store.usage().stored_bytes)
            self.samples += 1


def watch(watch: Watch, store: Store, running: Sequence[Any], beats: Sequence[Any]) -> None:
    """Until all processes have ended; kills one that stands still."""
    last = {process.name: (0, time.monotonic()) for process in running}
    while any(process.is_alive() for process in running):
        time.sleep(0.25)
        watch.sample(store)
        for process, beat in zip(running, beats, strict=True):
            calls, since_s = last[process.name]
            if beat.value != calls or not process.is_alive():
                last[process.name] = (beat.value, time.monotonic())
            elif time.monotonic() - since_s > STUCK_S:
                watch.dead.append(f"{process.name} stood still for {STUCK_S:g} s")
                process.kill()
                process.join()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole of it; what was found."""
    options.tenant = uuid.uuid4().hex
    spawn = multiprocessing.get_context("spawn")
    with open_store(options.url) as store:
        capacity = store.usage().capacity_bytes if "usage" in store.capabilities else None
        watched = Watch(capacity)
        beats = [spawn.Value("q", 0) for _ in range(options.processes)]
        start, results = spawn.Barrier(options.processes), spawn.SimpleQueue()
        running = [
            spawn.Process(
                target=work, args=(options, i, capacity is not None, beats[i], start, results)
            )
            for i in range(options.processes)
        ]
        found: list[Any] = []
        collector = threading.Thread(
            target=lambda: found.extend(results.get() for _ in running), daemon=True
        )
        collector.start()
        for process in running:
            process.start()
        watch(watched, store, running, beats)
        collector.join(10)
        watched.dead += [f"{p.name} ended with {p.exitcode}" for p in running if p.exitcode]
        if "scan" in store.capabilities:
            watched.left = sum(one.stored_bytes for one in store.scan())
    return verdict(options, watched, found)


def verdict(options: argparse.Namespace, watched: Watch, found: list[Any]) -> dict[str, Any]:
    tallies = [tally for one, _, _ in found for tally in one]
    counts = sum((tally.counts for tally in tallies), collections.Counter())
    capacity = watched.capacity
    over = 0 if capacity is None else max(watched.highest - options.slack - capacity, 0)
    over_left = 0 if capacity is None else max(watched.left - capacity, 0)
    corrupt = sum(one for _, one, _ in found)
    unexpected = [text for _, _, texts in found for text in texts]
    unexpected += [f"only {len(found)} processes reported"] * (len(found) != options.processes)
    idle = not (counts["set"] and counts["hit"] and counts["deleted"])
    bad = counts["wrong"] or corrupt or over or over_left or watched.dead or unexpected or idle
    return {
        "good": not bad,
        "store": shown_url(options.url).partition("://")[0],
        "workers": f"{options.processes} x {options.threads}, {options.seconds:g} s",
        **{name: counts[name] for name in
           ("calls", "set", "refused", "hit", "missed", "deleted", "wrong", "lost")},
        "corrupt": corrupt,
        "capacity": capacity,
        "highest": watched.highest if capacity is not None else watched.left,
        "samples": watched.samples,
        "left": watched.left,
        "over": max(over, over_left),
        "errors": dict(sum((tally.errors for tally in tallies), collections.Counter())),
        "examples": [text for tally in tallies for text in tally.wrong][:10],
        "dead": watched.dead,
        "unexpected": unexpected,
    }  # fmt: skip


HEADINGS = (
    "store | processes x threads | calls | pages set | refused | read | missed | deleted "
    "| wrong or lost | bad on the way | capacity | most held | over | errors | processes alive"
)


def row(name: str, found: dict[str, Any], processes: int) -> str:
    errors = ", ".join(f"{count} {what}" for what, count in found["errors"].items()) or "0"
    cells = (
        name, found["workers"], *(f"{found[one]:,}" for one in
        ("calls", "set", "refused", "hit", "missed", "deleted", "wrong", "corrupt")),
        "none" if found["capacity"] is None else size(found["capacity"]), size(found["highest"]),
        f"{found['over']:,} B", errors, f"{processes - len(found['dead'])} of {processes}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="a store that may be filled; its pages are left there")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--threads", type=int, default=4, help="of each process (default 4)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--working-set", type=parse_size, default="256MiB", metavar="SIZE",
        help="bytes of all pages, if all were stored (default 256MiB); give the store less",
    )  # fmt: skip
    parser.add_argument(
        "--slack", type=parse_size, default="0", metavar="SIZE",
        help="what `usage` may tell beyond the capacity (default 0)",
    )  # fmt: skip
    parser.add_argument("--name", help="what the row calls the store (default: its scheme)")
    parser.add_argument("--json", action="store_true", help="all figures, as JSON")
    options = parser.parse_args(argv)
    found = run(options)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("| " + HEADINGS + " |\n|" + " --- |" * (HEADINGS.count("|") + 1))
        print(row(options.name or found["store"], found, options.processes))
    for what in (*found["examples"], *found["dead"], *found["unexpected"]):
        print(f"WRONG: {what}", file=sys.stderr)
    return 0 if found["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
