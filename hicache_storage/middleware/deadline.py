"""Deadline: no call takes the caller longer than so many seconds, whatever the backend does.

A call that blocks can't be interrupted, only left behind. So each runs in a thread of its own on
private memory: bytes that arrive late land there and are dropped, never in a slot that the
engine has handed on. That costs a copy and a thread a batch; use it round backends that have no
deadline of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..calling import Caller
from ..config import option
from ..errors import BackendTimeout, BackendUnavailable
from ..forking import renew_lock_in_child
from ..hookspecs import hookimpl
from ..page import PageSpans, spans_bytes
from .guard import GuardedCalls

T = TypeVar("T")


@dataclass(frozen=True)
class DeadlineConfig:
    """Options of `deadline`."""

    seconds: float = option(5.0, unit="s", doc="Longest time that a call may take.")
    abandoned: int = option(4, doc="Calls left behind at most; further ones fail at once.")


class Deadline(GuardedCalls):
    """Raises BackendTimeout when a call isn't back in time, and drops what comes later."""

    Config = DeadlineConfig

    def __init__(self, inner: Caller, config: DeadlineConfig) -> None:
        super().__init__(inner)
        self.config = config
        self._lock = threading.Lock()
        renew_lock_in_child(self)
        self._abandoned: set[threading.Thread] = set()

    def guard(self, operation: str, call: Callable[[], T]) -> T:
        with self._lock:
            self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
            if len(self._abandoned) >= self.config.abandoned:
                raise BackendUnavailable(
                    f"not asked: {len(self._abandoned)} calls that missed their deadline still run",
                    backend=self.inner.name,
                    operation=operation,
                )
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((True, call()))
            except BaseException as error:
                outcome.append((False, error))

        thread = threading.Thread(target=run, name=f"deadline-{operation}", daemon=True)
        thread.start()
        thread.join(self.config.seconds)
        if not outcome:
            with self._lock:
                self._abandoned.add(thread)
            raise BackendTimeout(
                f"no answer in {self.config.seconds} s",
                backend=self.inner.name,
                operation=operation,
            )
        done, value = outcome[0]
        if not done:
            raise value
        return value  # type: ignore[no-any-return]

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        private: list[PageSpans] = [
            (memoryview(bytes(page[0])), memoryview(b"".join(page[1:]))) for page in pages
        ]
        return self.guard("batch_set", lambda: self.inner.batch_set(keys, private, prefix_keys))

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        private: list[PageSpans] = [
            (memoryview(bytearray(len(b[0]))), memoryview(bytearray(spans_bytes(b[1:]))))
            for b in buffers
        ]
        hits = self.guard("batch_get", lambda: self.inner.batch_get(keys, private, prefix_keys))
        for hit, (header, body), spans in zip(hits, private, buffers, strict=True):
            if hit:
                spans[0][:] = header
                start = 0
                for span in spans[1:]:
                    span[:] = body[start : start + len(span)]
                    start += len(span)
        return hits

    @hookimpl
    def close(self) -> None:
        """Waits for abandoned calls, as long as one call may take, then closes."""
        until_s = time.monotonic() + self.config.seconds
        for thread in self._abandoned:
            thread.join(max(0.0, until_s - time.monotonic()))
        self.inner.close()
