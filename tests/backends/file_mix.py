"""Threads of one process that set, get, look up and delete shared pages under a capacity.

    file_mix.py ROOT SEED SECONDS THREADS CAPACITY

Checks every byte that it reads; prints how many pages it stored, read and missed.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter

from backends.file_rig import found, key, opened, store

VERSIONS = range(3)
NUMBERS = 400
SIZES = (512, 4000, 60_000)


def work(backend: object, seed: int, seconds: float, counts: Counter[str]) -> None:
    pick = random.Random(seed)
    end_s = time.monotonic() + seconds
    mine: Counter[str] = Counter()
    while time.monotonic() < end_s:
        size = pick.choice(SIZES)
        first = pick.randrange(NUMBERS) * len(SIZES) + SIZES.index(size)
        numbers = range(first, first + len(SIZES) * pick.randrange(1, 9), len(SIZES))
        action = pick.random()
        if action < 0.4:
            done = store(backend, numbers, size, version=pick.choice(VERSIONS))
            mine["stored"] += sum(done)
            mine["refused"] += done.count(False)
        elif action < 0.85:
            hits = found(backend, numbers, size, versions=VERSIONS)
            mine["read"] += sum(hits)
            mine["missed"] += hits.count(False)
        elif action < 0.95:
            mine["looked up"] += backend.exists([key(number) for number in numbers])
        else:
            assert all(backend.delete([key(number) for number in numbers]))
            mine["deleted"] += len(numbers)
    counts.update(mine)


def main() -> None:
    root, seed, seconds, threads, capacity = sys.argv[1], *map(float, sys.argv[2:])
    backend = opened(root, capacity=int(capacity), recency_s=0.0, low_watermark=0.8)
    counts: Counter[str] = Counter()
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(backend, int(seed) * 100 + number, seconds, counts)
        except BaseException as error:
            failures.append(error)
            raise

    workers = [threading.Thread(target=guarded, args=(n,)) for n in range(int(threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    backend.close()
    if failures:
        raise SystemExit(1)
    print(dict(counts))


if __name__ == "__main__":
    main()
