"""A writer that is killed: stores pages of its own keys and says each one that was acknowledged.

    file_writer.py ROOT OPTIONS

Stays warm and forks a worker for each line "start" on its standard input, so that a round costs
no start of Python. The worker prints "pid" and its process id, then writes batches of pages for
ever and prints the numbers that `batch_set` answered True for, a whole line at a time. Once it is
killed its parent prints "over".
"""

from __future__ import annotations

import os
import random
import sys

from backends.file_rig import found, opened, store

SIZES = (600, 5_000, 70_000, 1_000_000)


def size_of(number: int) -> int:
    """Each page has its size told by its number."""
    return SIZES[number % len(SIZES)]


def work(root: str, options: dict[str, object], start: int) -> None:
    backend = opened(root, **options)
    pick = random.Random(start)
    number = start
    while True:
        size = size_of(number)
        numbers = range(number, number + len(SIZES) * pick.randrange(1, 4), len(SIZES))
        stored = store(backend, numbers, size)
        done = [str(one) for one, answer in zip(numbers, stored, strict=True) if answer]
        os.write(1, (" ".join(done) + "\n").encode())
        if pick.random() < 0.3:
            found(backend, range(start + number % len(SIZES), number + 1, len(SIZES)), size)
        number += 1 if pick.random() < 0.5 else len(SIZES) * 3 + 1


def main() -> None:
    root, options = sys.argv[1], eval(sys.argv[2])
    opened(root, **options).close()  # warm: everything is imported and tried once
    for line in sys.stdin:
        start = int(line)
        pid = os.fork()
        if pid == 0:
            try:
                os.write(1, f"pid {os.getpid()}\n".encode())
                work(root, options, start)
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        print("over", flush=True)


if __name__ == "__main__":
    main()
