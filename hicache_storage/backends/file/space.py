"""Space: room for pages, within the capacity and the bytes that the file system keeps free.

Whoever writes asks for room first. When there is none it waits, for a bounded time, while the
evictor makes some.
"""

from __future__ import annotations

import time

from ...failures import FailureLog
from .config import FileConfig
from .evictor import WAIT_S, Evictor, free_bytes
from .ledger import Amount, Balance, Ledger, Mark, Reservation
from .root import Root

STEP_BYTES = 64 << 20
"""Most room that a batch takes at a time, or a sixteenth of the capacity: others want some too."""
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
        if page_bytes > free:
            return None
        return Reservation(Amount(min(left_bytes, free), pages))

    def settle(self, room: Reservation, added: Amount) -> None:
        """Nothing to account for."""

    def mark(self) -> Mark:
        """For `release`."""
        return Mark()

    def release(self, removed: Amount, mark: Mark) -> None:
        """Nothing to account for."""

    def recount(self) -> None:
        """Nothing to count."""

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
    """Room that is shared with other processes and kept by evicting. Thread-safe."""

    def __init__(self, root: Root, config: FileConfig, failures: FailureLog) -> None:
        self._capacity = config.capacity
        self._failures = failures
        self._ledger = Ledger(f"{root.control}/ledger")
        self._evictor = Evictor(root, self._ledger, config, failures)
        self._step_bytes = min(STEP_BYTES, (config.capacity or STEP_BYTES * 16) // 16)

    def reserve(self, left_bytes: int, page_bytes: int, pages: int) -> Reservation | None:
        """Room for a page of `page_bytes` and for more of what a batch has left (`left_bytes`,
        `pages`). Waits for the evictor if there is none; None if there is none then."""
        if self._capacity is not None and page_bytes > self._capacity:
            return None
        wanted = max(min(left_bytes, self._step_bytes), page_bytes)
        if self._evictor.short_bytes(wanted) > 0:
            self._evictor.make_room(needed_bytes=wanted)
            if self._evictor.short_bytes(page_bytes) > 0:
                return None
        deadline_s = time.monotonic() + WAIT_S
        for _ in range(_TRIES):
            room = self._ledger.reserve(wanted, page_bytes, pages, self._capacity)
            if room is not None or time.monotonic() > deadline_s:
                return room
            self._evictor.make_room(needed_bytes=page_bytes)
        return None

    def settle(self, room: Reservation, added: Amount) -> None:
        """Accounts for what was written into the room."""
        try:
            balance = self._ledger.settle(room, added)
        except OSError as error:  # it says too much until the next recount
            self._failures.note("ledger", error)
        else:
            self._evictor.look(balance)

    def mark(self) -> Mark:
        """To be taken before pages are removed, for `release`."""
        return self._ledger.read().mark

    def release(self, removed: Amount, mark: Mark) -> None:
        """Accounts for pages that were removed since `mark`."""
        try:
            self._ledger.release(removed, mark)
        except OSError as error:  # it says too much until the next recount
            self._failures.note("ledger", error)

    def recount(self) -> None:
        """Makes the ledger true, after much was removed."""
        if self._capacity is not None:
            self._evictor.recount()

    def make_room(self, needed_bytes: int) -> bool:
        """Evicts because the file system says that it is full; False if that took too long."""
        return self._evictor.make_room(forced_bytes=needed_bytes)

    def balance(self) -> Balance | None:
        """What the ledger says; None without a capacity, as then nobody recounts."""
        return self._ledger.read() if self._capacity is not None else None

    def close(self) -> None:
        """Ends the evictor."""
        self._evictor.close()
        self._ledger.close()

    def abandon(self) -> None:
        """Drops what a forked child inherited."""
        self._evictor.abandon()
        self._ledger.abandon()
