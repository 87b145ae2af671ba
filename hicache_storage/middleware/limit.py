"""Limit: at most so many calls in a backend at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from ..calling import Caller
from ..config import option
from ..errors import BackendTimeout, ConfigError
from ..forking import renew_in_child
from .guard import GuardedCalls

T = TypeVar("T")


@dataclass(frozen=True)
class LimitConfig:
    """Options of `limit`."""

    calls: int = option(16, doc="Calls that may be in the backend at once.")
    wait_s: float = option(5.0, unit="s", doc="How long a call waits for its turn, then fails.")

    def __post_init__(self) -> None:
        if self.calls < 1:
            raise ConfigError(f"limit: calls must be at least 1, got {self.calls}")
        if self.wait_s < 0:
            raise ConfigError(f"limit: wait_s must not be negative, got {self.wait_s}")


class Limit(GuardedCalls):
    """Lets `calls` calls in at once; the others wait their turn, up to `wait_s`."""

    Config = LimitConfig

    def __init__(self, inner: Caller, config: LimitConfig) -> None:
        super().__init__(inner)
        self.config = config
        self._without_threads()
        renew_in_child(self, Limit._without_threads)

    def _without_threads(self) -> None:
        # Not a semaphore: an interrupt could leave its lock locked.
        self._turns: SimpleQueue[None] = SimpleQueue()
        for _ in range(self.config.calls):
            self._turns.put(None)

    def guard(self, operation: str, call: Callable[[], T]) -> T:
        turns = self._turns
        try:
            turns.get(timeout=self.config.wait_s)
        except Empty:
            raise BackendTimeout(
                f"{self.config.calls} calls are under way and none ended in {self.config.wait_s} s",
                backend=self.inner.name,
                operation=operation,
            ) from None
        try:
            return call()
        finally:
            if turns is self._turns:  # else the call forked, and this is the child
                turns.put(None)

    spread = GuardedCalls.in_parts
