"""Environment: one LMDB environment, its transactions, its growing map, and forks."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lmdb

from ...errors import BackendError, BackendUnavailable
from .config import MOST_MAP_BYTES, LmdbConfig
from .gate import Gate
from .judging import DATA, note_closed
from .opening import open_environment
from .records import Scratch, Trees

READER_CHECK_S = 10.0
"""How often a writer looks for readers that were killed: LMDB reuses no page that was freed after
such a one began."""
_ATTEMPTS = 16
FORK_WAIT_S = 10.0
_STEP_BYTES = 64 << 30


class Reading:
    """The calls of a read transaction, until it ends.

    The client gives a reader's slot free only when the transaction object goes away, which would
    be whenever the last frame that knows it does: in a forked child even, which has no such slot.
    So nobody else gets hold of that object, and `end` is the end of it.
    """

    __slots__ = ("_abort", "cursor", "get", "id", "stat")

    def __init__(self, transaction: Any) -> None:
        self._abort = transaction.abort
        self.cursor = transaction.cursor
        self.get = transaction.get
        self.id = transaction.id
        self.stat = transaction.stat

    def end(self) -> None:
        self._abort()
        del self._abort, self.cursor, self.get, self.id, self.stat


class Environment:
    """An environment that all stores of this process share; see `sharing`. Thread-safe."""

    def __init__(self, path: str, config: LmdbConfig) -> None:
        self.path = path
        self.config = config
        self.users = 0
        self.page_bytes = 0
        """Length of an LMDB page."""
        self.longest_key = 0
        self.data_fd = -1
        """The data file, for reading. Within a transaction only."""
        self.scratch = Scratch()
        """For whoever has the write transaction; there is one at a time."""
        self._gate = Gate()
        self._one_writer = threading.Lock()
        self._map_bytes = config.map_size
        self._handle: Any = None
        self._trees: Trees | None = None
        self._pid = os.getpid()
        self._readers_checked_s = time.monotonic()
        self._open()

    # -- transactions ------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[tuple[Reading, Trees]]:
        """A read transaction, giving views into the map, and the trees. Keep it short: pages
        freed since it began can't be reused before it ends."""
        reading = Reading(self._begin(write=False))
        try:
            yield reading, self._known_trees()
        finally:
            reading.end()
            self._gate.leave()

    @contextmanager
    def writing(self) -> Iterator[tuple[Any, Trees]]:
        """The write transaction, of which there is one in all processes, and the trees. It is
        committed at the end, or undone if that raises."""
        # Some releases of the client refuse a second writer instead of letting it wait.
        with self._one_writer:
            txn = self._begin(write=True)
            try:
                try:
                    yield txn, self._known_trees()
                except BaseException:
                    # The client lets a writer give up only at a moment at which no other thread
                    # is in a call of its own, which may never come while several are reading.
                    with self._gate.sole():
                        txn.abort()
                    raise
                txn.commit()
            finally:
                self._gate.leave()

    def _begin(self, *, write: bool) -> Any:
        """A transaction; the gate has been entered. What others did to the file meanwhile, or a
        fork, is dealt with here."""
        self._notice_fork()
        checked = False
        for _ in range(_ATTEMPTS):
            self._gate.enter()
            try:
                if self._handle is not None:
                    if write:
                        self._check_readers()
                    return self._handle.begin(write=write, buffers=not write)
                repair = self._reopen
            except lmdb.MapResizedError:
                repair = self._adopt_map
            except lmdb.PanicError:
                # A failed write of the meta page; LMDB wants the environment opened anew.
                repair = self._reopen
            except lmdb.ReadersFullError as error:
                most = self._handle.max_readers()
                self._handle.reader_check()
                self._gate.leave()
                if checked:
                    raise BackendUnavailable(
                        f"more than {most} reads are under way in all processes; raise max_readers "
                        "(the first process that opens the store decides)",
                        backend="lmdb",
                        operation="begin",
                    ) from error
                checked = True
                continue
            except BaseException:
                self._gate.leave()
                raise
            self._gate.leave()
            with self._gate.alone():
                repair()
        raise BackendUnavailable(
            f"{self.path} changed {_ATTEMPTS} times while a transaction was to begin",
            backend="lmdb",
            operation="begin",
        )

    def _check_readers(self) -> None:
        if time.monotonic() - self._readers_checked_s >= READER_CHECK_S:
            self._readers_checked_s = time.monotonic()
            self._handle.reader_check()

    # -- the map -----------------------------------------------------------------------------

    @property
    def map_bytes(self) -> int:
        """Size of this process's map: what the file may grow to before the map has to."""
        return self._map_bytes

    def grow(self, seen_bytes: int, more_bytes: int) -> bool:
        """Enlarges the map if it is still `seen_bytes` long, by at least `more_bytes`; False if
        `max_size` or the operating system refuses. Not within a transaction."""
        self._notice_fork()
        with self._gate.alone():
            if self._handle is None or self._map_bytes > seen_bytes:
                return True
            if self._handle.reader_check():
                return True  # what they kept from being reused may be room enough
            present = self._map_bytes
            most = min(self.config.max_size, MOST_MAP_BYTES)
            wanted = max(present + min(present, _STEP_BYTES), present + more_bytes)
            target = min(-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE, most)
            if target <= present or not _addressable(target):
                return False
            return self._resize(target)

    def _resize(self, map_bytes: int) -> bool:
        """Alone in the gate. After a failure LMDB has no map at all, so it is opened anew."""
        try:
            self._handle.set_mapsize(map_bytes)
        except (lmdb.Error, OverflowError, MemoryError):
            self._reopen()
            return False
        self._map_bytes = self._handle.info()["map_size"]
        return True

    def _adopt_map(self) -> None:
        """Another process wrote beyond our map: takes over the size that it noted in the file."""
        before = self._map_bytes
        if not self._resize(0):
            raise BackendError(
                f"{self.path} was enlarged by another process beyond what this one can map",
                backend="lmdb",
                operation="begin",
            )
        if self._map_bytes < before:
            self._resize(before)

    # -- the handle --------------------------------------------------------------------------

    def sync(self) -> None:
        """Puts every commit of this file, by whatever process, on the disk."""
        self._notice_fork()
        self._gate.enter()
        try:
            if self._handle is not None:
                self._handle.sync(True)
        finally:
            self._gate.leave()

    def reader_count(self) -> int:
        """Entries of the reader table, of all processes. Within a transaction only."""
        lines = str(self._handle.readers()).strip().splitlines()
        return max(len(lines) - 1, 0)

    @property
    def handle(self) -> Any:
        """The client's own handle, for looking at; None while it is closed."""
        return self._handle

    def close(self) -> None:
        self._notice_fork()
        with self._gate.alone():
            if self._handle is not None and not self.config.read_only:
                note_closed(self.path)
            self._close()

    def _open(self) -> None:
        handle, trees = open_environment(self.path, self.config, self._map_bytes)
        try:
            self.data_fd = os.open(f"{self.path}/{DATA}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            handle.close()
            raise
        # What is read ahead is said each time.
        os.posix_fadvise(self.data_fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._handle, self._trees = handle, trees
        self._map_bytes = self._handle.info()["map_size"]
        self.page_bytes = int(self._handle.stat()["psize"])
        self.longest_key = int(self._handle.max_key_size())
        self._pid = os.getpid()

    def _close(self) -> None:
        handle, self._handle, self._trees = self._handle, None, None
        if handle is not None:
            self._close_data()
            handle.close()

    def _close_data(self) -> None:
        fd, self.data_fd = self.data_fd, -1
        if fd >= 0:
            os.close(fd)

    def _reopen(self) -> None:
        """Alone in the gate."""
        self._close()
        self._open()

    def _known_trees(self) -> Trees:
        assert self._trees is not None
        return self._trees

    # -- forks -------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self._gate.idle

    def before_fork(self) -> bool:
        """Waits until no transaction is under way, so that the child inherits none."""
        return self._gate.shut(FORK_WAIT_S)

    def after_fork_in_parent(self) -> None:
        self._gate.open()

    def after_fork_in_child(self, quiet: bool) -> None:
        """Drops the inherited handle; the next transaction opens another one.

        Closing a handle clears the reader slots of the calling process only, and the child has
        none. Ending an inherited transaction would clear the parent's: so unless it was `quiet`,
        the handle is left as it is, for good.
        """
        handle = self._handle
        self._handle = self._trees = None
        self._close_data()
        self._gate, self._one_writer, self.scratch = Gate(), threading.Lock(), Scratch()
        self._pid = os.getpid()
        if handle is not None:
            if quiet:
                handle.close()
            else:
                _abandoned.append(handle)

    def _notice_fork(self) -> None:
        """A fork that Python was not told of (by C code) is noticed at the next use."""
        if self._pid != os.getpid():
            self.after_fork_in_child(self._gate.idle)


_abandoned: list[Any] = []


def _addressable(map_bytes: int) -> bool:
    """Whether the process has room for such a map. Found out on a mapping of its own, since
    LMDB gives up the present one before it asks for the next."""
    try:
        mmap.mmap(
            -1, map_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
        ).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True
