"""Around: a backend around a backend, which passes every call on as it is.

What a wrapper can't do (retry, answer without calling in, change arguments) is a subclass of
this. It has the capabilities of the backend inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..calling import Caller
from ..hookspecs import OPTIONAL_HOOKS, Scope, StoredPage, Usage, hookimpl
from ..page import PageSpans

ALWAYS = {"open", "close"}


class Around:
    """Passes every hook on to `inner`."""

    def __init__(self, inner: Caller) -> None:
        self.inner = inner
        self.scope: Scope = inner.scope
        for hook in OPTIONAL_HOOKS:
            if hook not in inner.capabilities and hook not in ALWAYS:
                setattr(self, hook, None)  # hides the hook from pluggy

    @hookimpl
    def open(self) -> None:
        self.inner.open()

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        return self.inner.batch_set(keys, pages, prefix_keys)

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        return self.inner.batch_get(keys, buffers, prefix_keys)

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        """Has the inner backend say how a batch is cut, and lend its threads. A wrapper that makes
        calls again or counts them takes `whole` for its `spread`."""
        self.inner.spread(hook, page_bytes, count, work)

    def whole(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        """A `spread` that leaves the batch one call."""
        work(slice(0, count))

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        return self.inner.exists(keys, prefix_keys)

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        return self.inner.delete(keys)

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        return self.inner.scan(prefix)

    @hookimpl
    def usage(self) -> Usage:
        return self.inner.usage()

    @hookimpl
    def flush(self) -> None:
        self.inner.flush()

    @hookimpl
    def clear(self) -> None:
        self.inner.clear()

    @hookimpl
    def close(self) -> None:
        self.inner.close()
