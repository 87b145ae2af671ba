"""Gate: many transactions at once, or one change of what they stand on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Gate:
    """Lets transactions through until somebody needs to be alone. Thread-safe.

    LMDB forbids changing the map, or closing, while this process has a transaction. Whoever
    waits to be alone goes first, so that readers can't hold it up for ever. Not reentrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._shut = False

    @property
    def idle(self) -> bool:
        """Whether no transaction is under way, and nobody is alone."""
        return self._inside == 0 and not self._shut

    def enter(self) -> None:
        """Waits until nobody is, or waits to be, alone."""
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self._inside <= 1:
                self._changed.notify_all()

    def shut(self, timeout_s: float | None = None) -> bool:
        """Keeps everyone out and waits until the last one is; False if that took too long."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if not self._wait_while(lambda: self._shut, until_s):
                return False
            self._shut = True
            try:
                if self._wait_while(lambda: self._inside > 0, until_s):
                    return True
            except BaseException:
                self._reopen()
                raise
            self._reopen()
            return False

    def open(self) -> None:
        """Ends a `shut` that succeeded."""
        with self._changed:
            self._reopen()

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.shut()
        try:
            yield
        finally:
            self.open()

    @contextmanager
    def sole(self) -> Iterator[None]:
        """For someone inside: waits until all others have left, and keeps new ones out. At most
        one at a time."""
        with self._changed:
            # If somebody waits to be alone, nobody new comes in anyway.
            shut_here, self._shut = not self._shut, True
            try:
                self._wait_while(lambda: self._inside > 1, None)
            except BaseException:
                if shut_here:
                    self._reopen()
                raise
        try:
            yield
        finally:
            if shut_here:
                self.open()

    def _reopen(self) -> None:
        self._shut = False
        self._changed.notify_all()

    def _wait_while(self, condition: Callable[[], bool], until_s: float | None) -> bool:
        while condition():
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self._changed.wait(left_s)
        return True
