"""Session: what one process holds of an open root; a forked child makes one of its own."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...failures import FailureLog
from ...page import PageSpans
from .config import FileConfig
from .directories import Directories
from .mounts import is_network_type
from .root import Root, open_root
from .space import FixedSpace, Space
from .writers import sweep

SWEEP_WAIT_S = 5.0
"""Longest time that opening waits for the removal of dead writers' files; it goes on behind."""

BatchWork = Callable[[list[str], list[PageSpans]], list[bool]]


class Session:
    """An open root in one process: its descriptors, threads and locks. Thread-safe."""

    def __init__(self, config: FileConfig) -> None:
        self.pid = os.getpid()
        self.config = config
        self.failures = FailureLog(f"file store {config.path}")
        self.root: Root = open_root(config)
        self.refusal = "the store is opened with read_only" if config.read_only else ""
        if self.root.writer is None and not config.read_only:
            self.refusal = f"{self.root.path} can't be written to: {self.root.refusal}"
            self.failures.note("write", self.refusal)
        self.directories = Directories(self.root.path)
        self.space = self._make_space()
        self._numbers = itertools.count()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._sweep()
        _SESSIONS.add(self)

    @property
    def may_write(self) -> bool:
        """Whether pages can be stored; if not, `refusal` says why."""
        return self.root.writer is not None

    @property
    def syncs(self) -> bool:
        """Whether pages are put on the disk before they count as stored."""
        return self.config.durability == "fsync"

    def temp_name(self) -> str:
        """A temporary file's name that nobody else uses."""
        assert self.root.writer is not None
        return f".{self.root.writer.id}-{next(self._numbers)}.tmp"

    def spread(self, work: BatchWork, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        """`work` on all of a batch, by as many threads as the options say; answers in order.

        Equal keys must be served in order, so a batch that has some is served by one thread.
        """
        threads = min(self.config.io_threads, len(keys))
        if threads == 1 or len(set(keys)) != len(keys):
            return work(keys, pages)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.config.io_threads, "hicache-file")
            pool = self._pool
        parts = [slice(i, None, threads) for i in range(threads)]
        futures = [pool.submit(work, keys[part], pages[part]) for part in parts]
        answers = [False] * len(keys)
        # All must be over before any error is raised: they read and write the caller's memory.
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        for part, future in zip(parts, futures, strict=True):
            answers[part] = future.result()
        return answers

    def close(self) -> None:
        """Ends threads, closes descriptors, takes this process off the list of writers."""
        _SESSIONS.discard(self)
        if self._pool is not None:
            self._pool.shutdown()
        self.space.close()
        if self.root.writer is not None:
            self.root.writer.close()

    def abandon(self) -> None:
        """In a forked child: drops what was inherited, which is still the parent's."""
        self.space.abandon()
        if self.root.writer is not None:
            self.root.writer.abandon()

    def _make_space(self) -> Space | FixedSpace:
        config, root = self.config, self.root
        if not self.may_write:
            return FixedSpace(root.path, config.min_free)
        if is_network_type(root.file_system) and not config.network_eviction:
            limit = "" if config.capacity is None else f"; capacity={config.capacity} has no effect"
            self.failures.note(
                "network file system",
                f"{root.path} is on {root.file_system}: several hosts may write there, whose locks "
                f"and counts can't be relied on, so nothing is evicted{limit}. Set "
                "network_eviction if one host alone writes to it",
            )
            return FixedSpace(root.path, config.min_free)
        return Space(root.path, root.control, config, self.failures)

    def _sweep(self) -> None:
        """Removes what dead writers left. Temporary files are never read, so nobody has to wait
        for a long walk."""
        if not self.may_write:
            return
        thread = threading.Thread(
            target=sweep,
            args=(self.root.path, self.root.writers, self.config.temp_age_s),
            name="hicache-file-sweep",
            daemon=True,
        )
        thread.start()
        thread.join(SWEEP_WAIT_S)


_SESSIONS: weakref.WeakSet[Any] = weakref.WeakSet()


def _abandon_inherited() -> None:
    for session in list(_SESSIONS):
        session.abandon()
    _SESSIONS.clear()


os.register_at_fork(after_in_child=_abandon_inherited)
