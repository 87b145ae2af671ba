"""Space: room for pages, within the capacity and the bytes that the file system keeps free.

Threads that write ask for room. When there is none they wait, for a bounded time, while one
background thread evicts.
"""

from __future__ import annotations

import os
import threading
import time

from ...failures import FailureLog
from .config import FileConfig
from .eviction import MOST_PAGES, Scanner, remove_pages
from .ledger import Balance, Ledger, Reservation
from .lockfile import LockFile
from .root import Root

WAIT_S = 5.0
"""Longest time that a write waits for room."""
STEP_BYTES = 64 << 20
"""Room that a batch takes at a time; processes share the last bytes by such steps."""
_RETRY_LOCK_S = 0.01
_TRIES = 8


class FixedSpace:
    """Room where nothing may be evicted: as much as the file system has to give."""

    def __init__(self, root: str, min_free: int) -> None:
        self._root = root
        self._min_free = min_free

    def reserve(self, left_bytes: int, page_bytes: int, pages: int) -> Reservation | None:
        """Room for a page of `page_bytes` and for what a batch has left (`left_bytes`, `pages`);
        None if the page doesn't fit."""
        free = free_bytes(self._root) - self._min_free
        return Reservation(min(left_bytes, free), pages, 0) if page_bytes <= free else None

    def settle(self, room: Reservation, added_bytes: int, added_pages: int) -> None:
        """Nothing to account for."""

    def release(self, removed_bytes: int, removed_pages: int) -> None:
        """Nothing to account for."""

    def make_room(self, needed_bytes: int) -> bool:
        """False: nothing may be evicted."""
        return False

    def balance(self) -> Balance | None:
        """None: nobody counts."""
        return None

    def close(self) -> None:
        """Nothing to release."""

    def abandon(self) -> None:
        """Nothing to drop."""


class Space:
    """Room of one root, kept by evicting. Thread-safe; make another one after a fork.

    Opening counts what is there, if nobody did since the machine started.
    """

    def __init__(self, root: Root, config: FileConfig, failures: FailureLog) -> None:
        self._root = root.path
        self._config = config
        self._failures = failures
        self._turn = LockFile(f"{root.control}/evictor.lock")
        self._ledger = Ledger(f"{root.control}/ledger")
        self._scanner = Scanner(root, self._ledger, config.temp_age_s)
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._forced_bytes = self._needed_bytes = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        if config.capacity is not None:
            with self._turn.held():
                if self._ledger.read().ended == 0:
                    self._scanner.recount()
        self.low_bytes = int((config.capacity or 0) * config.low_watermark)
        self.high_bytes = ((config.capacity or 0) + self.low_bytes) // 2

    def close(self) -> None:
        """Ends the evictor."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Drops what a forked child inherited; the evictor's thread did not come along."""
        self._turn.close()
        self._ledger.close()

    def balance(self) -> Balance | None:
        """What the ledger says; None without a capacity, as then nobody recounts."""
        return self._ledger.read() if self._config.capacity is not None else None

    def release(self, removed_bytes: int, removed_pages: int) -> None:
        """Accounts for pages that were deleted."""
        try:
            self._ledger.release(removed_bytes, removed_pages)
        except OSError as error:  # counts too much until the next recount
            self._failures.note("ledger", error)

    def reserve(self, left_bytes: int, page_bytes: int, pages: int) -> Reservation | None:
        """Room for a page of `page_bytes` and for more of what a batch has left (`left_bytes`,
        `pages`). Waits for the evictor if there is none; None if there is none then."""
        capacity = self._config.capacity
        if capacity is not None and page_bytes > capacity:
            return None
        wanted = max(min(left_bytes, STEP_BYTES), page_bytes)
        if self._short_bytes(wanted) > 0:
            self._ask(needed_bytes=wanted, wait=True)
            if self._short_bytes(page_bytes) > 0:
                return None
        deadline_s = time.monotonic() + WAIT_S
        for _ in range(_TRIES):
            room = self._ledger.reserve(wanted, page_bytes, pages, capacity)
            if room is not None or time.monotonic() > deadline_s:
                return room
            self._ask(needed_bytes=page_bytes, wait=True)
        return None

    def settle(self, room: Reservation, added_bytes: int, added_pages: int) -> None:
        """Accounts for what was written into the room, and has pages evicted ahead of need."""
        try:
            balance = self._ledger.settle(room, added_bytes, added_pages)
        except OSError as error:  # counts too much until the next recount
            self._failures.note("ledger", error)
            return
        if self._config.capacity is not None and (
            balance.stored_bytes > self.high_bytes or self._is_stale(balance)
        ):
            self._ask()

    def make_room(self, needed_bytes: int) -> bool:
        """Evicts because the file system says that it is full; False if that took too long."""
        return self._ask(forced_bytes=needed_bytes, wait=True)

    def _is_stale(self, balance: Balance) -> bool:
        return time.time() - balance.recounted_s > self._config.resync_s

    def _short_bytes(self, needed_bytes: int) -> int:
        """Bytes that the file system lacks to keep `min_free` after a write of so many."""
        return self._config.min_free + needed_bytes - free_bytes(self._root)

    def _ask(self, *, needed_bytes: int = 0, forced_bytes: int = 0, wait: bool = False) -> bool:
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._needed_bytes = max(self._needed_bytes, needed_bytes)
            self._forced_bytes = max(self._forced_bytes, forced_bytes)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="hicache-file-evictor", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            if not wait:
                return True
            return self._changed.wait_for(lambda: self._done >= mine or self._stopping, WAIT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._stopping)
                if self._stopping:
                    return
                serving, needed, forced = self._asked, self._needed_bytes, self._forced_bytes
                self._needed_bytes = self._forced_bytes = 0
            try:
                self._serve(needed, forced)
            except Exception as error:
                self._failures.note("evict", error)
            with self._changed:
                self._done = serving
                self._changed.notify_all()

    def _serve(self, needed_bytes: int, forced_bytes: int) -> None:
        """One round of eviction, as soon as no other process is at it."""
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
        if goal <= 0:
            if self._is_stale(balance):
                self._scanner.recount()
            return
        freed = 0
        while freed < goal and not self._stopping:
            share = goal / max(balance.stored_bytes, goal)
            most = min(int(balance.pages * share * 1.25) + 64, MOST_PAGES)
            oldest = self._scanner.oldest_pages(most)
            # The ledger has just been recounted: perhaps others made room meanwhile.
            balance = self._ledger.read()
            goal = freed + self._goal_bytes(balance, needed_bytes, forced_bytes - freed)
            got = remove_pages(oldest, self._ledger, goal - freed)
            freed += got
            if got == 0:
                return

    def _goal_bytes(self, balance: Balance, needed_bytes: int, forced_bytes: int) -> int:
        """Bytes to evict; 0 or less if there is room enough."""
        goal = forced_bytes
        capacity = self._config.capacity
        if capacity is not None and (
            balance.stored_bytes > self.high_bytes or balance.stored_bytes + needed_bytes > capacity
        ):
            over = balance.stored_bytes + needed_bytes - capacity
            goal = max(goal, over, balance.stored_bytes - self.low_bytes)
        short = self._short_bytes(needed_bytes)
        if short > 0 or forced_bytes > 0:
            # A share of the store at a time, or every batch would wait for a walk.
            share = int(balance.stored_bytes * (1 - self._config.low_watermark))
            goal = max(goal, short, min(share, balance.stored_bytes))
        return goal


def free_bytes(path: str) -> int:
    """Bytes that the file system of `path` has free for us."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
