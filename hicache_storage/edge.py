"""StorageEdge: the one place where errors of storage become misses.

Everything that faces an engine (the cache controller, the SGLang adapter) calls storage through
it. It never raises into an engine's thread, never returns None or a short result; each failure
is counted and logged at a limited rate.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .failures import FailureLog
from .forking import renew_lock_in_child
from .pairing import PairCount, PairedStore, PairResult, leading_run

T = TypeVar("T")

FRUITLESS_WRITES = 8
"""Write batches in a row that store no target page before the edge calls itself unhealthy."""

logger = logging.getLogger("hicache_storage")


@dataclass
class EdgeCounts:
    """Pages that an engine asked for and what it got, since the edge was made."""

    lookups: int = 0
    lookup_pages: int = 0
    found_pages: int = 0
    """Usable pages that lookups reported."""
    first_page_missing: int = 0
    """Lookups whose very first page was absent: nothing behind it can be used."""
    read_pages: int = 0
    target_hits: int = 0
    draft_hits: int = 0
    lost_drafts: int = 0
    """Pages in the leading run of target hits whose draft did not come."""
    usable_pages: int = 0
    """What the engine may use of the pages read; less than the hits where drafts are required."""
    written_pages: int = 0
    written_drafts: int = 0
    refused_pages: int = 0
    refused_drafts: int = 0
    orphan_drafts: int = 0
    """Drafts stored whose target was refused."""
    errors: int = 0


class ErrorsToMisses:
    """Calls storage and gives `otherwise` for an error, which it counts and logs. Thread-safe.

    What is no `Exception` (an interrupt, the end of the process) passes through.
    """

    def __init__(self, name: str) -> None:
        self.failures = FailureLog(f"storage {name!r}")
        self._lock = threading.Lock()
        renew_lock_in_child(self)
        self._errors = 0

    @property
    def errors(self) -> int:
        """How many there were."""
        return self._errors

    def call(self, operation: str, call: Callable[[], T], otherwise: T) -> T:
        """What `call` returns, or `otherwise` if it raises; `operation` names it in the log."""
        try:
            return call()
        except Exception as error:
            self.note(operation, error)
            return otherwise

    def note(self, operation: str, error: BaseException | str) -> None:
        """Counts and logs an error that somebody else has caught, or found without one."""
        with self._lock:
            self._errors += 1
        self.failures.note(operation, error)


class StorageEdge:
    """A PairedStore that never raises. Thread-safe."""

    def __init__(self, pairs: PairedStore) -> None:
        self.pairs = pairs
        self.counts = EdgeCounts()
        self.guard = ErrorsToMisses(pairs.store.name)
        self.failures = self.guard.failures
        self._lock = threading.Lock()
        renew_lock_in_child(self)
        self._fruitless_writes = 0

    @property
    def healthy(self) -> bool:
        """False once several write batches in a row stored not a single target page, for whatever
        reason: the engine goes on, but with host memory alone."""
        return self._fruitless_writes < FRUITLESS_WRITES

    def batch_set(
        self,
        hashes: Sequence[str],
        target_pages: Sequence[Any],
        draft_pages: Sequence[Any] | None = None,
        prefix_hashes: Sequence[str] | None = None,
    ) -> PairResult:
        """As PairedStore.batch_set; after an error nothing counts as stored."""
        result = self._guarded(
            "write",
            lambda: self.pairs.batch_set(hashes, target_pages, draft_pages, prefix_hashes),
            self._nothing(len(hashes), draft_pages),
        )
        with self._lock:
            counts = self.counts
            counts.written_pages += sum(result.target)
            counts.refused_pages += len(hashes) - sum(result.target)
            if result.draft is not None:
                counts.written_drafts += sum(result.draft)
                counts.refused_drafts += len(hashes) - sum(result.draft)
                counts.orphan_drafts += sum(
                    d and not t for t, d in zip(result.target, result.draft, strict=True)
                )
        if result.target:
            self._note_health(any(result.target))
        return result

    def batch_get(
        self,
        hashes: Sequence[str],
        target_buffers: Sequence[Any],
        draft_buffers: Sequence[Any] | None = None,
        prefix_hashes: Sequence[str] | None = None,
    ) -> PairResult:
        """As PairedStore.batch_get; after an error nothing is usable."""
        result = self._guarded(
            "read",
            lambda: self.pairs.batch_get(hashes, target_buffers, draft_buffers, prefix_hashes),
            self._nothing(len(hashes), draft_buffers),
        )
        with self._lock:
            counts = self.counts
            counts.read_pages += len(hashes)
            counts.target_hits += sum(result.target)
            counts.usable_pages += result.usable_pages
            if result.draft is not None:
                run = leading_run(result.target)
                drafts = sum(result.draft[:run])
                counts.draft_hits += drafts
                counts.lost_drafts += run - drafts
        return result

    def exists(
        self, hashes: Sequence[str], prefix_hashes: Sequence[str] | None = None
    ) -> PairCount:
        """As PairedStore.exists; 0 after an error."""
        count = self._guarded(
            "lookup", lambda: self.pairs.exists(hashes, prefix_hashes), PairCount(0, None, 0)
        )
        with self._lock:
            self.counts.lookups += 1
            self.counts.lookup_pages += len(hashes)
            self.counts.found_pages += count.usable
            self.counts.first_page_missing += bool(hashes) and count.target == 0
        return count

    def _note_health(self, fruitful: bool) -> None:
        """One loud line when writing stops to work and one when it works again."""
        with self._lock:
            before = self._fruitless_writes
            self._fruitless_writes = 0 if fruitful else before + 1
        name = self.pairs.store.name
        if not fruitful and before + 1 == FRUITLESS_WRITES:
            logger.error(
                "storage %r: the last %d write batches stored nothing; pages live in host memory "
                "alone until this is mended (failures: %s)",
                name,
                FRUITLESS_WRITES,
                dict(self.failures.counts) or "none raised, all pages refused",
            )
        elif fruitful and before >= FRUITLESS_WRITES:
            logger.warning("storage %r: pages are stored again", name)

    def _nothing(self, length: int, drafts: Sequence[Any] | None) -> PairResult:
        draft = None if drafts is None or self.pairs.draft is None else [False] * length
        return PairResult([False] * length, draft, self.pairs.pairing)

    def _guarded(self, operation: str, call: Callable[[], T], otherwise: T) -> T:
        result = self.guard.call(operation, call, otherwise)
        draft_error = getattr(result, "draft_error", None)
        if draft_error is not None:
            self.guard.note(f"draft {operation}", draft_error)
        with self._lock:
            self.counts.errors = self.guard.errors
        return result
