"""Retry: makes a failed call again where its error says that this can help.

Waits follow "full jitter" (M. Brooker, "Exponential Backoff And Jitter", 2015): a random time
up to a bound that doubles with each attempt. A budget keeps retries from multiplying the load of
a store that is failing for everyone: each call earns a fraction of a retry, and where nothing is
saved up a failure is passed on at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..calling import Caller
from ..config import option
from ..errors import BackendError
from ..forking import renew_lock_in_child
from .guard import GuardedCalls

T = TypeVar("T")


@dataclass(frozen=True)
class RetryConfig:
    """Options of `retry`."""

    attempts: int = option(3, doc="Calls made at most, the first one included.")
    first_wait_s: float = option(0.05, unit="s", doc="Bound of the first wait; doubles each time.")
    longest_wait_s: float = option(1.0, unit="s", doc="Bound of every wait.")
    total_s: float = option(5.0, unit="s", doc="No new attempt starts later than this.")
    budget: float = option(0.2, doc="Retries earned by a call; 0.2 adds a fifth of the load.")


class Retry(GuardedCalls):
    """Retries calls whose error is `retryable`, and clears that mark when it gives up."""

    Config = RetryConfig
    SAVED_AT_MOST = 10.0

    def __init__(self, inner: Caller, config: RetryConfig) -> None:
        super().__init__(inner)
        self.config = config
        self.retries = 0
        self._saved = self.SAVED_AT_MOST
        self._lock = threading.Lock()
        renew_lock_in_child(self)

    def guard(self, operation: str, call: Callable[[], T]) -> T:
        config = self.config
        deadline_s = time.monotonic() + config.total_s
        bound_s = config.first_wait_s
        with self._lock:
            self._saved = min(self._saved + config.budget, self.SAVED_AT_MOST)
        for left in range(config.attempts - 1, -1, -1):
            try:
                return call()
            except BackendError as error:
                wait_s = random.uniform(0, min(bound_s, config.longest_wait_s))
                late = time.monotonic() + wait_s > deadline_s
                if not error.retryable or left == 0 or late or not self._spend():
                    error.retryable = False
                    raise
            time.sleep(wait_s)
            bound_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _spend(self) -> bool:
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            self.retries += 1
            return True
