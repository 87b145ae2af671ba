"""GuardedCalls: the base of middleware that treats every call that moves pages alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..hookspecs import hookimpl
from ..page import PageSpans
from .around import Around

T = TypeVar("T")


class GuardedCalls(Around):
    """Sends each call that reads, writes, looks up or deletes pages through `guard`."""

    def guard(self, operation: str, call: Callable[[], T]) -> T:
        """Makes the call, now, later, again or not at all; a subclass says which."""
        raise NotImplementedError

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        return self.guard("batch_set", lambda: self.inner.batch_set(keys, pages, prefix_keys))

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        return self.guard("batch_get", lambda: self.inner.batch_get(keys, buffers, prefix_keys))

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        return self.guard("exists", lambda: self.inner.exists(keys, prefix_keys))

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        return self.guard("delete", lambda: self.inner.delete(keys))
