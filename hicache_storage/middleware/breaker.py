"""Breaker: a store that keeps failing costs nothing until it heals.

The circuit breaker of M. Nygard, "Release It!": closed while calls succeed; open after several
failures in a row, when calls fail at once without reaching the store; half-open after a
cool-down, when one call is let through as a probe whose outcome closes or reopens it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from ..calling import Caller
from ..config import option
from ..errors import BackendError, BackendUnavailable
from ..forking import renew_in_child
from .guard import GuardedCalls

T = TypeVar("T")
State = Literal["closed", "open", "half-open"]
logger = logging.getLogger("hicache_storage")


@dataclass(frozen=True)
class BreakerConfig:
    """Options of `breaker`."""

    failures: int = option(5, doc="Failed calls in a row that open it.")
    cooldown_s: float = option(2.0, unit="s", doc="How long it stays open before a probe.")


class Breaker(GuardedCalls):
    """Fails fast while the store is failing. Any error counts, a miss doesn't."""

    Config = BreakerConfig

    def __init__(self, inner: Caller, config: BreakerConfig) -> None:
        super().__init__(inner)
        self.config = config
        self.rejected_calls = 0
        self._failures = 0
        self._opened_s: float | None = None
        self._without_threads()
        renew_in_child(self, Breaker._without_threads)

    def _without_threads(self) -> None:
        self._lock = threading.Lock()
        self._probe: object | None = None
        """The call that is let through to see whether the store has healed."""

    @property
    def state(self) -> State:
        with self._lock:
            if self._opened_s is None:
                return "closed"
            cooled = time.monotonic() - self._opened_s >= self.config.cooldown_s
            return "half-open" if self._probe or cooled else "open"

    def guard(self, operation: str, call: Callable[[], T]) -> T:
        mine = object()
        try:
            self._admit(operation, mine)
            try:
                result = call()
            except BackendError as error:
                self._failed(error, mine)
                raise
            self._succeeded(mine)
            return result
        finally:
            if self._probe is mine:  # says nothing about the store, but another call must probe it
                self._probe = None

    spread = GuardedCalls.in_parts

    def _admit(self, operation: str, call: object) -> None:
        """Makes this call the probe if there is to be one; raises BackendUnavailable if it may not
        pass."""
        with self._lock:
            if self._opened_s is None:
                return
            waited_s = time.monotonic() - self._opened_s
            if waited_s >= self.config.cooldown_s and self._probe is None:
                self._probe = call
                return
            self.rejected_calls += 1
        raise BackendUnavailable(
            f"not asked: its last {self.config.failures} calls failed, it is tried again "
            f"{max(0.0, self.config.cooldown_s - waited_s):.1f} s from now",
            backend=self.inner.name,
            operation=operation,
            retryable=False,
        )

    def _failed(self, error: BackendError, call: object) -> None:
        with self._lock:
            probe = self._probe is call
            self._failures += 1
            opens = probe or (self._opened_s is None and self._failures >= self.config.failures)
            if opens:
                self._opened_s = time.monotonic()
            if probe:
                self._probe = None
        if opens and not probe:
            logger.warning(
                "backend %r: circuit open after %d failures in a row, tried again every %.1f s; "
                "last: %s", self.inner.name, self.config.failures, self.config.cooldown_s, error,
            )  # fmt: skip

    def _succeeded(self, call: object) -> None:
        with self._lock:
            probe = self._probe is call
            if probe or self._opened_s is None:
                self._failures = 0
            if probe:
                self._opened_s = self._probe = None
        if probe:
            logger.warning("backend %r: circuit closed, the store answers again", self.inner.name)
