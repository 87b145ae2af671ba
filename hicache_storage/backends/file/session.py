"""Session: what one process holds of an open root; a forked child makes one of its own."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ...errors import BackendUnavailable
from ...failures import FailureLog
from ..lending import THREADS, Lending, cut
from ..mounts import trust
from .config import FileConfig
from .directories import Directories
from .faults import FULL, NOT_WRITABLE
from .names import temp_name
from .root import Root, open_root
from .space import FixedSpace, Space
from .writers import Writer, sweep

SWEEP_WAIT_S = 5.0
"""Longest time that opening waits for the removal of dead writers' files; it goes on behind."""

CALL_BYTES = {"batch_set": 4 << 20, "batch_get": 2 << 20}
"""What a thread takes on at a time: little enough for a processor's caches, enough to hide what a
call costs, which to write has two changes of the ledger."""

BY_THREADS_BYTES = {"batch_set": 64 << 10, "batch_get": 256 << 10}
"""Page sizes from which on THREADS serve a batch unless the options say how many: the kernel's part
of the work outweighs what threads cost each other there."""


class Session:
    """An open root in one process: its descriptors, threads and locks. Thread-safe."""

    def __init__(self, config: FileConfig) -> None:
        self.pid = os.getpid()
        self.config = config
        self.failures = FailureLog(f"file store {config.path}")
        self.root: Root = open_root(config.path, read_only=config.read_only)
        self.directories = Directories(self.root.path)
        self.refusal = "the store was opened with read_only" if config.read_only else ""
        """Why pages can't be stored; "" if they can."""
        self._writer: Writer | None = None
        self._numbers = itertools.count()
        self._lending = Lending("hicache-file", config.io_threads or THREADS, self.failures)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.space: Space | FixedSpace = FixedSpace(self.root.path, config.min_free)
        if not self.refusal:
            self._open_for_writing()
        _SESSIONS.add(self)

    @property
    def may_write(self) -> bool:
        """Whether pages can be stored."""
        return not self.refusal

    @property
    def syncs(self) -> bool:
        """Whether pages are put on the disk before they count as stored."""
        return self.config.durability == "fsync"

    def temp_name(self) -> str:
        """A temporary file's name that nobody else uses. Raises OSError if this process can't be
        put on the list of writers."""
        if self._writer is None:
            with self._lock:
                self._writer = self._writer or Writer(self.root.writers)
        return temp_name(self._writer.id, next(self._numbers))

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        """Calls `work` with the parts of a batch of `count` pages, on the caller's thread and, if
        there is enough for them, on others. Raises what a call raised.

        A batch within such a call is a part already.
        """
        most = THREADS if page_bytes >= BY_THREADS_BYTES[hook] else 1
        threads = min(self.config.io_threads or most, count)
        step = -(-count // threads)
        if not self.syncs:  # directories are synced once a part
            step = min(step, max(CALL_BYTES[hook] // max(page_bytes, 1), 1))
        self._lending.serve(cut(count, step), count, work, threads)

    def close(self) -> None:
        """Ends threads, closes descriptors, takes this process off the list of writers."""
        _SESSIONS.discard(self)
        self._closing.set()
        self._lending.close()
        self.space.close()
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """In a forked child: drops what was inherited, which is still the parent's."""
        self.space.abandon()
        if self._writer is not None:
            self._writer.abandon()

    def _open_for_writing(self) -> None:
        try:
            self.temp_name()
            if self._may_evict():
                self.space = Space(self.root, self.config, self.failures)
        except OSError as error:
            if error.errno in NOT_WRITABLE:
                self.refusal = f"{self.root.path} can't be written to and is only read: {error}"
                self.failures.note("write", self.refusal)
                return
            if error.errno not in FULL:
                if self._writer is not None:
                    self._writer.close()
                raise BackendUnavailable(str(error), backend="file", operation="open") from error
            self.failures.note("open", error)
        self._sweep()

    def _may_evict(self) -> bool:
        """Whether locks and counts can be relied on; warns if not."""
        kind, capacity = self.root.file_system, self.config.capacity
        trusted = "local" if self.config.network_eviction else trust(kind)
        if trusted == "network":
            limit = "" if capacity is None else f" and capacity={capacity} has no effect"
            self.failures.note(
                "network file system",
                f"{self.root.path} is on {kind}, where locks and counts of several hosts can't be "
                f"relied on, so nothing is evicted{limit}; set network_eviction if one host alone "
                "writes there",
            )
        elif trusted == "doubtful" and capacity is not None:
            self.failures.note(
                "file system",
                f"{self.root.path} is on {kind}; the capacity is kept only if one host alone "
                "writes there",
            )
        return trusted != "network"

    def _sweep(self) -> None:
        """Removes what dead writers left. Temporary files are never read, so nobody has to wait
        for a long walk."""
        thread = threading.Thread(
            target=sweep,
            args=(self.root.path, self.root.writers, self.config.temp_age_s, self._closing),
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
