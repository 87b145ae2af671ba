"""How many requests run at a time: a bound that a store's complaints lower and its answers raise.

Additive increase, multiplicative decrease, as in TCP. The bound is shared by all calls of a
process; while one of them waits, none takes more than its share.
"""

from __future__ import annotations

import threading
import time

DECREASE = 0.7
DECREASE_INTERVAL_S = 0.1
"""A burst of complaints is one complaint."""


class Ticket:
    """One call's standing at the gate."""

    def __init__(self) -> None:
        self.held = 0
        """Requests under way."""
        self.waiting = False


class Gate:
    """Admits requests. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._bound = float(most)
        self._running = 0
        self._decreased_s = float("-inf")
        self._tickets: list[Ticket] = []
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)

    @property
    def bound(self) -> int:
        """Requests that may run at a time now, at least 1."""
        return int(self._bound)

    @property
    def running(self) -> int:
        """Requests under way."""
        return self._running

    def register(self) -> Ticket:
        """A ticket for one call; give it back with `leave`."""
        ticket = Ticket()
        with self._lock:
            self._tickets.append(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Ends a call, and whatever it still holds."""
        with self._lock:
            self._tickets.remove(ticket)
            self._running -= ticket.held
            ticket.held = 0
            self._room.notify_all()

    def enter(self, ticket: Ticket) -> bool:
        """Admits one request of the call, or not now. Doesn't wait."""
        with self._lock:
            return self._enter(ticket)

    def wait(self, ticket: Ticket, until_s: float) -> bool:
        """Admits one request of the call, waiting until `until_s` on the monotonic clock."""
        with self._lock:
            while not self._enter(ticket):
                left = until_s - time.monotonic()
                if left <= 0:
                    ticket.waiting = False
                    return False
                self._room.wait(left)
            return True

    def done(self, ticket: Ticket) -> None:
        """Ends one admitted request."""
        with self._lock:
            ticket.held -= 1
            self._running -= 1
            if any(t.waiting for t in self._tickets):
                self._room.notify_all()

    def raise_bound(self) -> None:
        """After a success: one more at a time for each round of successes."""
        if self._bound < self.most:
            with self._lock:
                self._bound = min(float(self.most), self._bound + 1 / self._bound)

    def lower_bound(self) -> None:
        """After a complaint."""
        with self._lock:
            now = time.monotonic()
            if now - self._decreased_s >= DECREASE_INTERVAL_S:
                self._decreased_s = now
                self._bound = max(1.0, self._bound * DECREASE)

    def _enter(self, ticket: Ticket) -> bool:
        if self._running >= int(self._bound) or self._over_share(ticket):
            ticket.waiting = True
            return False
        ticket.waiting = False
        ticket.held += 1
        self._running += 1
        return True

    def _over_share(self, ticket: Ticket) -> bool:
        if len(self._tickets) == 1:
            return False
        share = max(1, int(self._bound) // len(self._tickets))
        return ticket.held >= share and any(
            other.waiting and other.held < share for other in self._tickets if other is not ticket
        )
