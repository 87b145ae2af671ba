"""Limit: at most so many calls in a backend at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..calling import Caller
from ..config import option
from ..errors import BackendTimeout
from ..forking import renew_in_child
from .guard import GuardedCalls

T = TypeVar("T")


@dataclass(frozen=True)
class LimitConfig:
    """Options of `limit`."""

    calls: int = option(16, doc="Calls that may be in the backend at once.")
    wait_s: float = option(5.0, unit="s", doc="How long a call waits for its turn, then fails.")


class Limit(GuardedCalls):
    """Lets `calls` calls in at once; the others wait their turn, up to `wait_s`."""

    Config = LimitConfig

    def __init__(self, inner: Caller, config: LimitConfig) -> None:
        super().__init__(inner)
        self.config = config
        self._without_threads()
        renew_in_child(self, Limit._without_threads)

    def _without_threads(self) -> None:
        self._turns = threading.Semaphore(self.config.calls)

    def guard(self, operation: str, call: Callable[[], T]) -> T:
        turns = self._turns
        if not turns.acquire(timeout=self.config.wait_s):
            raise BackendTimeout(
                f"{self.config.calls} calls are under way and none ended in {self.config.wait_s} s",
                backend=self.inner.name,
                operation=operation,
            )
        try:
            return call()
        finally:
            if turns is self._turns:  # else the call forked, and this is the child
                turns.release()

    spread = GuardedCalls.in_parts
