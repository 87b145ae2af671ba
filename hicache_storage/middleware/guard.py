"""GuardedCalls: the base of middleware that treats every call that moves pages alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..calling import Caller
from ..hookspecs import hookimpl
from ..page import PageSpans
from ..parts import PartOf
from .around import Around

T = TypeVar("T")


class GuardedCalls(Around):
    """Sends each call that reads, writes, looks up or deletes pages through `guard`. A batch is
    one, also where a subclass has the backend cut it (`spread = GuardedCalls.in_parts`)."""

    def __init__(self, inner: Caller) -> None:
        super().__init__(inner)
        self._within = PartOf[bool]()
        """Whether a batch is guarded already."""

    def guard(self, operation: str, call: Callable[[], T]) -> T:
        """Makes the call, now, later, again or not at all; a subclass says which."""
        raise NotImplementedError

    spread = Around.whole
    """`guard` may make a call again, or on another thread."""

    def in_parts(
        self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]
    ) -> None:
        """A `spread` for where `guard` makes each call at most once, on the caller's thread: the
        batch is cut as the backend inside wants it, behind one `guard`."""
        part = self._within.of(True, work)
        self._guarded(hook, lambda: self.inner.spread(hook, page_bytes, count, part))

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        return self._guarded("batch_set", lambda: self.inner.batch_set(keys, pages, prefix_keys))

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        return self._guarded("batch_get", lambda: self.inner.batch_get(keys, buffers, prefix_keys))

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        return self._guarded("exists", lambda: self.inner.exists(keys, prefix_keys))

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        return self._guarded("delete", lambda: self.inner.delete(keys))

    def _guarded(self, operation: str, call: Callable[[], T]) -> T:
        return call() if self._within.batch else self.guard(operation, call)
