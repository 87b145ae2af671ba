"""Lending: threads of a process that work on a batch beside its caller."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ..failures import FailureLog
from ..parts import PartOf, Parts

_MANY_CORES = 8
THREADS = 4 if len(os.sched_getaffinity(0)) >= _MANY_CORES else 2
"""Threads that serve a batch of large pages, the caller's among them, where the options don't say
it. An LLM server's scheduler polls in the same interpreter, and each thread waits for it after
every call of the system: beside it on 16 cores four threads read pages of 8 MiB 1.2 to 1.7 times
as fast as two. On two cores more than two threads are in each other's way."""


class Lending:
    """Up to `most` - 1 threads, made when they are first needed; a forked child has its own.

    `name` is what they are called. Thread-safe.
    """

    def __init__(self, name: str, most: int, failures: FailureLog) -> None:
        self._name = name
        self._most = most
        self._failures = failures
        self._within = PartOf[bool]()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._closing = False

    def serve(
        self, parts: Sequence[slice], count: int, work: Callable[[slice], None], threads: int
    ) -> None:
        """Calls `work` with the parts of a batch of `count` pages, on the caller's thread and up
        to `threads` - 1 others. Raises what a call raised.

        A batch within such a call is a part already.
        """
        if self._within.batch:
            work(slice(0, count))
            return
        todo = iter(parts)
        if threads <= 1:
            self._serve(todo, work)
            return
        # Until the batch is over they read and write the caller's memory, and not a moment longer.
        with Parts(count, work, "the store") as taken:
            self._ask_for_help(partial(self._serve, todo, taken), threads - 1)
            self._serve(todo, taken)

    def close(self) -> None:
        """Ends the threads. From then on callers do all the work."""
        self._notice_fork()
        with self._lock:
            self._closing = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _serve(self, todo: Iterator[slice], work: Callable[[slice], None]) -> None:
        serve = self._within.of(True, work)
        for part in todo:  # whoever is free takes the next
            serve(part)

    def _ask_for_help(self, serve: Callable[[], None], threads: int) -> None:
        """Has up to so many other threads `serve`, when they are free; maybe after the batch."""
        try:
            for _ in range(threads):
                self._helpers().submit(serve)
        except RuntimeError as error:  # no thread can be started (now, or as the process ends)
            self._failures.note("threads", error)

    def _helpers(self) -> ThreadPoolExecutor:
        self._notice_fork()
        with self._lock:
            if self._closing:
                raise RuntimeError("the store is being closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._most - 1, self._name)
            return self._pool

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            # The parent's threads aren't here, and its lock may be held for good.
            self._lock, self._pool, self._pid = threading.Lock(), None, os.getpid()


def cut(count: int, step: int) -> list[slice]:
    """The parts of a batch of `count` pages, `step` pages each."""
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
