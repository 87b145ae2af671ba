"""memory://: pages in this process's memory. The reference backend; for tests and trials."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import option
from ..forking import renew_lock_in_child
from ..hookspecs import StoredPage, Usage, hookimpl
from ..page import PageSpans, spans_bytes


@dataclass(frozen=True)
class MemoryConfig:
    """Options of memory://."""

    capacity: int | None = option(
        None, unit="bytes", doc="Most bytes to hold; the least recently used pages go first."
    )


class MemoryBackend:
    """Pages in a dict, least recently used first. Nothing survives the process."""

    Config = MemoryConfig
    scope = "process"

    def __init__(self, config: MemoryConfig) -> None:
        self._capacity = config.capacity
        self._pages: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._stored_bytes = 0
        self._lock = threading.Lock()
        renew_lock_in_child(self)

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        return [self._set(key, b"".join(page)) for key, page in zip(keys, pages, strict=True)]

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        return [self._get(key, spans) for key, spans in zip(keys, buffers, strict=True)]

    @hookimpl
    def exists(self, keys: list[str]) -> int:
        with self._lock:
            return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        with self._lock:
            for key in keys:
                self._drop(key)
        return [True] * len(keys)

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        with self._lock:
            found = [
                StoredPage(key, len(page), used_s)
                for key, (page, used_s) in self._pages.items()
                if key.startswith(prefix)
            ]
        return iter(found)

    @hookimpl
    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._pages), self._stored_bytes, self._capacity)

    @hookimpl
    def clear(self) -> None:
        with self._lock:
            self._pages.clear()
            self._stored_bytes = 0

    def _set(self, key: str, page: bytes) -> bool:
        if self._capacity is not None and len(page) > self._capacity:
            return False
        with self._lock:
            self._drop(key)
            self._pages[key] = (page, time.time())
            self._stored_bytes += len(page)
            while self._capacity is not None and self._stored_bytes > self._capacity:
                self._drop(next(iter(self._pages)))
        return True

    def _get(self, key: str, spans: PageSpans) -> bool:
        with self._lock:
            if key not in self._pages:
                return False
            page = self._pages[key][0]
            self._pages[key] = (page, time.time())
            self._pages.move_to_end(key)
        if len(page) != spans_bytes(spans):
            return False
        start = 0
        for span in spans:
            span[:] = page[start : start + len(span)]
            start += len(span)
        return True

    def _drop(self, key: str) -> None:
        page = self._pages.pop(key, None)
        if page is not None:
            self._stored_bytes -= len(page[0])
