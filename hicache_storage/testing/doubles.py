"""CountingBackend: a backend around a backend that counts what reaches it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from ..calling import Caller
from ..hookspecs import StoredPage, Usage, hookimpl
from ..keys import split_page_key, split_stored_key
from ..middleware.around import Around
from ..page import PageSpans, spans_bytes


class CountingBackend(Around):
    """Passes every call on to `backend` and counts calls, keys and bytes. Thread-safe."""

    def __init__(self, backend: object, *, name: str = "counted") -> None:
        super().__init__(backend if isinstance(backend, Caller) else Caller(backend, name=name))
        self.calls: Counter[str] = Counter()
        """Calls by hook."""
        self.keys: Counter[str] = Counter()
        """Keys given, by hook."""
        self.tags: Counter[tuple[str, str]] = Counter()
        """Keys given, by (hook, pool tag): ("batch_set", "d") are draft pages written."""
        self.set_bytes = 0
        """Bytes of pages that were acknowledged, headers included."""
        self.get_bytes = 0
        """Bytes of pages that arrived, headers included."""
        self._lock = threading.Lock()

    spread = Around.whole
    """So that counts don't depend on the machine."""

    def reset(self) -> None:
        """Starts again from zero."""
        with self._lock:
            self.calls.clear()
            self.keys.clear()
            self.tags.clear()
            self.set_bytes = self.get_bytes = 0

    def _count(self, hook: str, keys: Sequence[str] = ()) -> None:
        tags = [split_page_key(split_stored_key(key)[1])[0] for key in keys]
        with self._lock:
            self.calls[hook] += 1
            self.keys[hook] += len(keys)
            self.tags.update((hook, tag) for tag in tags)

    @hookimpl
    def open(self) -> None:
        self._count("open")
        self.inner.open()

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        self._count("batch_set", keys)
        stored = self.inner.batch_set(keys, pages, prefix_keys)
        with self._lock:
            self.set_bytes += _bytes_of(pages, stored)
        return stored

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        self._count("batch_get", keys)
        hits = self.inner.batch_get(keys, buffers, prefix_keys)
        with self._lock:
            self.get_bytes += _bytes_of(buffers, hits)
        return hits

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        self._count("exists", keys)
        return self.inner.exists(keys, prefix_keys)

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        self._count("delete", keys)
        return self.inner.delete(keys)

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        self._count("scan")
        return self.inner.scan(prefix)

    @hookimpl
    def usage(self) -> Usage:
        self._count("usage")
        return self.inner.usage()

    @hookimpl
    def flush(self) -> None:
        self._count("flush")
        self.inner.flush()

    @hookimpl
    def clear(self) -> None:
        self._count("clear")
        self.inner.clear()

    @hookimpl
    def close(self) -> None:
        self._count("close")
        self.inner.close()


def _bytes_of(pages: list[PageSpans], answers: list[bool]) -> int:
    return sum(spans_bytes(page) for page, answer in zip(pages, answers, strict=True) if answer)
