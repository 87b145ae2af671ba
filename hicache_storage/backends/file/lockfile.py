"""LockFile: a small file that processes lock against each other, found again if it was replaced."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class LockFile:
    """One process's access to a file under a lock. Thread-safe; make another one after a fork.

    The lock is a flock: the kernel drops it when its process dies.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = self._open()

    @contextmanager
    def held(self) -> Iterator[int]:
        """The file's descriptor, while nobody else has the lock. Raises OSError after `close`."""
        with self._lock:
            self._check_open()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                self._follow()
                yield self._fd
            finally:
                self._unlock()

    @contextmanager
    def attempt(self) -> Iterator[bool]:
        """Takes the lock if nobody has it; says whether."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            self._check_open()
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                self._follow()
                yield True
            finally:
                self._unlock()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Waits for whoever has the lock. The number of the descriptor is somebody else's then."""
        with self._lock:
            fd, self._fd = self._fd, -1
        os.close(fd)

    def abandon(self) -> None:
        """In a forked child: drops what was inherited, whoever had the lock."""
        os.close(self._fd)

    def _check_open(self) -> None:
        if self._fd < 0:
            raise OSError(errno.EBADF, "the store has been closed", self._path)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def _follow(self) -> None:
        """Goes over to the file that is at the path now, if ours was removed: others lock that."""
        while os.fstat(self._fd).st_nlink == 0:
            replacement = self._open()
            self._unlock()
            os.close(self._fd)
            self._fd = replacement
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def _unlock(self) -> None:
        # Said explicitly, as a forked child may hold the same open file.
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
