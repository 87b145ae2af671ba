"""Recency: which pages were used lately, kept in memory until it is worth a transaction."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable

AT_ONCE = 1024
"""Uses written in one transaction; as many wait for one at most before it comes."""


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Recency:
    """Uses of pages that were not written down yet. Thread-safe.

    A use counts only once it is `slack_s` newer than what the store says, so a page that is read
    all the time costs one small write every `slack_s` seconds. Killing the process loses what
    waits here: pages then look as old as they last were in the store.
    """

    def __init__(self, slack_s: float) -> None:
        self._slack_ms = int(slack_s * 1000)
        self._waiting: dict[bytes, int] = {}
        self._since_ms = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def pending(self) -> int:
        return len(self._waiting)

    @property
    def due(self) -> bool:
        """Whether enough uses wait, or have waited for long enough."""
        if not self._waiting:
            return False
        return len(self._waiting) >= AT_ONCE or now_ms() - self._since_ms >= self._slack_ms

    def used(self, key: bytes, noted_ms: int) -> None:
        """The page was used now; `noted_ms` is what the store says."""
        present = now_ms()
        if present - noted_ms < self._slack_ms:
            return
        self._notice_fork()
        with self._lock:
            if not self._waiting:
                self._since_ms = present
            self._waiting[key] = present

    def take(self) -> list[tuple[bytes, int]]:
        """Up to AT_ONCE uses, for writing; they wait no longer."""
        self._notice_fork()
        if not self._waiting:
            return []
        with self._lock:
            keys = list(itertools.islice(self._waiting, AT_ONCE))
            return [(key, self._waiting.pop(key)) for key in keys]

    def give_back(self, uses: Iterable[tuple[bytes, int]]) -> None:
        """Has uses wait that could not be written."""
        with self._lock:
            for key, used_ms in uses:
                self._waiting.setdefault(key, used_ms)

    def _notice_fork(self) -> None:
        """A forked child leaves what it inherited to its parent."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()
            self._waiting.clear()
