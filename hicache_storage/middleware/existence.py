"""ExistenceCache: remembers for a short time which pages are stored and which are not.

It can lie, since other processes write and evict; never for longer than its stated times, and a
page that a read did not find, or a write stored, is right at once. A read always goes to the
store, so the cache never turns a miss into a hit.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ..calling import Caller
from ..config import option
from ..forking import renew_lock_in_child
from ..hookspecs import hookimpl
from ..page import PageSpans
from ..parts import PartOf
from .around import Around


@dataclass(frozen=True)
class ExistenceConfig:
    """Options of `existence`."""

    found_s: float = option(10.0, unit="s", doc="How long a page counts as stored; 0 for never.")
    missing_s: float = option(1.0, unit="s", doc="How long a page counts as missing; 0 for never.")
    pages: int = option(100_000, doc="Pages remembered at most; the oldest go first.")


class ExistenceCache(Around):
    """Answers `exists` from memory where it can."""

    Config = ExistenceConfig

    def __init__(self, inner: Caller, config: ExistenceConfig) -> None:
        super().__init__(inner)
        self.config = config
        self._known: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        self._lock = threading.Lock()
        renew_lock_in_child(self)
        self._writes = 0
        self._part_of = PartOf[list[str]]()
        """What the batch has missed so far."""

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        known = 0
        with self._lock:
            now = time.monotonic()
            for key in keys:
                stored = self._remembered(key, now)
                if stored is False:
                    return known
                if stored is None:
                    break
                known += 1
        if known == len(keys):
            return known
        asked = keys[known:]
        prefix = None if prefix_keys is None else [*prefix_keys, *keys[:known]]
        writes = self._writes
        run = self.inner.exists(asked, prefix)
        self._learn(asked[:run], True)
        if writes == self._writes:
            self._learn(asked[run : run + 1], False)
        return known + run

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        with self._lock:
            self._writes += 1
        self._forget(keys)
        stored = self.inner.batch_set(keys, pages, prefix_keys)
        self._learn([key for key, done in zip(keys, stored, strict=True) if done], True)
        return stored

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        writes = self._writes
        hits = self.inner.batch_get(keys, buffers, prefix_keys)
        missed = [key for key, hit in zip(keys, hits, strict=True) if not hit]
        if self._part_of.batch is None:
            self._not_found(missed, writes)
        else:
            self._forget(missed)
            self._part_of.batch.extend(missed)
        return hits

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        """As the backend inside wants it. What its parts did not find is missing only if the batch
        as a whole doesn't fail."""
        writes, missed = self._writes, list[str]()
        self.inner.spread(hook, page_bytes, count, self._part_of.of(missed, work))
        self._not_found(missed, writes)

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        try:
            return self.inner.delete(keys)
        finally:
            self._forget(keys)

    @hookimpl
    def clear(self) -> None:
        try:
            self.inner.clear()
        finally:
            with self._lock:
                self._known.clear()

    def _not_found(self, missed: list[str], writes: int) -> None:
        if writes == self._writes:  # else one of them may have been stored meanwhile
            self._learn(missed, False)
        else:
            self._forget(missed)

    def _remembered(self, key: str, now: float) -> bool | None:
        stored, until_s = self._known.get(key, (None, 0.0))
        return stored if now < until_s else None

    def _learn(self, keys: list[str], stored: bool) -> None:
        lasts_s = self.config.found_s if stored else self.config.missing_s
        until_s = time.monotonic() + lasts_s
        with self._lock:
            for key in keys:
                self._known[key] = (stored, until_s)
                self._known.move_to_end(key)
            while len(self._known) > self.config.pages:
                self._known.popitem(last=False)

    def _forget(self, keys: list[str]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
