"""Evictor: the thread that makes room, and how much of it."""

from __future__ import annotations

import os
import threading
import time

from ...failures import FailureLog
from .config import FileConfig
from .ledger import Balance, Ledger
from .lockfile import LockFile
from .root import Root
from .scanner import Scanner

WAIT_S = 5.0
"""Longest time that anybody waits for a round of eviction."""
MOST_PAGES = 1 << 18
"""Pages that one walk finds at most: their names are kept in memory."""
_RETRY_LOCK_S = 0.01
_WALKING_SHARE = 50
"""Recounts take at most one part in so many of the time, however long a walk is."""


class Evictor:
    """Evicts for one process, in turn with all others. Thread-safe; make another after a fork.

    Making one counts what is there, if there is a capacity and nobody counted since the machine
    started. The thread starts with the first request.
    """

    def __init__(
        self, root: Root, ledger: Ledger, config: FileConfig, failures: FailureLog
    ) -> None:
        self._root = root.path
        self._ledger = ledger
        self._config = config
        self._failures = failures
        self._turn = LockFile(f"{root.control}/evictor.lock")
        self._scanner = Scanner(root, ledger, config.temp_age_s)
        self._low_bytes = int((config.capacity or 0) * config.low_watermark)
        self._high_bytes = ((config.capacity or 0) + self._low_bytes) // 2
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._needed_bytes = self._forced_bytes = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        if config.capacity is not None and ledger.read().mark.ended == 0:
            with self._turn.held():
                if ledger.read().mark.ended == 0:
                    self._scanner.recount()

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._turn.close()

    def abandon(self) -> None:
        """Drops what a forked child inherited; the thread did not come along."""
        self._turn.abandon()

    def short_bytes(self, needed_bytes: int) -> int:
        """Bytes that the file system lacks to keep `min_free` after a write of so many."""
        return self._config.min_free + needed_bytes - free_bytes(self._root)

    def look(self, balance: Balance) -> None:
        """Has pages evicted before the store is full, and the ledger recounted when it is due."""
        if self._config.capacity is not None and (
            balance.total.stored_bytes > self._high_bytes or self._is_due(balance)
        ):
            self._ask()

    def make_room(self, *, needed_bytes: int = 0, forced_bytes: int = 0) -> bool:
        """Waits until pages were evicted: so that `needed_bytes` fit, or `forced_bytes` in any
        case. False if that took too long."""
        mine = self._ask(needed_bytes, forced_bytes)
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= mine or self._stopping, WAIT_S)

    def recount(self) -> None:
        """Counts what is there, at once."""
        with self._turn.held():
            self._scanner.recount()

    def _ask(self, needed_bytes: int = 0, forced_bytes: int = 0) -> int:
        """Wakes the thread; the number of this request."""
        with self._changed:
            self._asked += 1
            self._needed_bytes = max(self._needed_bytes, needed_bytes)
            self._forced_bytes = max(self._forced_bytes, forced_bytes)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name="hicache-file-evictor", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # none can be started now, or as the process ends
                    self._failures.note("threads", error)
                    return self._done
                self._thread = thread
            self._changed.notify_all()
            return self._asked

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._stopping)
                if self._stopping:
                    return
                serving, needed, forced = self._asked, self._needed_bytes, self._forced_bytes
                self._needed_bytes = self._forced_bytes = 0
            try:
                self._take_turn(needed, forced)
            except Exception as error:
                self._failures.note("evict", error)
            with self._changed:
                self._done = serving
                self._changed.notify_all()

    def _take_turn(self, needed_bytes: int, forced_bytes: int) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not self._stopping and time.monotonic() < deadline_s:
            with self._turn.attempt() as held:
                if held:
                    self._evict(needed_bytes, forced_bytes)
                    return
            time.sleep(_RETRY_LOCK_S)

    def _evict(self, needed_bytes: int, forced_bytes: int) -> None:
        balance = self._ledger.read()
        goal = self._goal_bytes(balance, needed_bytes, forced_bytes)
        if goal <= 0 and self._is_due(balance):
            self._scanner.recount()
        freed = 0
        while goal > freed and not self._stopping:
            share = goal / max(balance.total.stored_bytes, goal)
            most = min(int(balance.total.pages * share * 1.25) + 64, MOST_PAGES)
            oldest = self._scanner.oldest_pages(most)
            # The ledger is true again now: perhaps there is room after all.
            balance = self._ledger.read()
            goal = freed + self._goal_bytes(balance, needed_bytes, forced_bytes - freed)
            got = self._scanner.remove(oldest, goal - freed)
            if got == 0:
                return
            freed += got

    def _goal_bytes(self, balance: Balance, needed_bytes: int, forced_bytes: int) -> int:
        """Bytes to evict; 0 or less if there is room enough."""
        total, capacity = balance.total.stored_bytes, self._config.capacity
        goal = forced_bytes
        if capacity is not None:
            over = total + needed_bytes - capacity
            if over > 0 or total > self._high_bytes:
                goal = max(goal, over, total - self._low_bytes)
        short = self.short_bytes(needed_bytes)
        if short > 0 or forced_bytes > 0:
            # A share of the store at a time, or every batch would wait for a walk.
            goal = max(goal, short, int(total * (1 - self._config.low_watermark)))
        return goal

    def _is_due(self, balance: Balance) -> bool:
        pause_s = max(self._config.resync_s, _WALKING_SHARE * self._scanner.took_s)
        return time.time() - balance.recounted_s > pause_s


def free_bytes(path: str) -> int:
    """Bytes that the file system of `path` has free for us."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
