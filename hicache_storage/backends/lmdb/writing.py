"""Writer: stores a batch in few transactions, and makes room where it lacks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import lmdb

from ...failures import FailureLog
from ...page import PageSpans, spans_bytes
from .config import LmdbConfig
from .environment import Environment
from .recency import Recency, now_ms
from .records import MOST_PAGE_BYTES, Changes

ASYNC_COMMIT_BYTES = 8 << 20
"""Most bytes of one commit that doesn't wait for the disk. Beyond it the allocator gives the
memory back after each commit and takes it anew: a third of the speed."""
SYNC_COMMIT_BYTES = 64 << 20
"""Most bytes of one commit that waits for the disk, which bounds memory and how long other
writers wait."""
_SPARE_BYTES = 1 << 20


class Writer:
    """Stores one batch; made for it."""

    def __init__(
        self, environment: Environment, config: LmdbConfig, recency: Recency, failures: FailureLog
    ) -> None:
        self._environment = environment
        self._config = config
        self._recency = recency
        self._failures = failures
        self._kept: set[bytes] = set()
        """Keys that this batch stored, or found stored: it doesn't evict them for its own rest."""

    def store(self, keys: Sequence[bytes], pages: Sequence[PageSpans]) -> list[bool]:
        """True for each page that is stored."""
        answers = [False] * len(keys)
        sizes = [spans_bytes(page) for page in pages]
        for group in self._groups(keys, sizes):
            for i in self._store_group(group, keys, pages, sizes):
                answers[i] = True
        return answers

    def _groups(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Iterator[list[int]]:
        """The places of pages that can be stored at all, as many together as one commit takes."""
        waits = self._config.durability != "async"
        most = SYNC_COMMIT_BYTES if waits else ASYNC_COMMIT_BYTES
        group: list[int] = []
        group_bytes = 0
        for i, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            if not self._storable(key, size):
                continue
            if group and group_bytes + size > most:
                yield group
                group, group_bytes = [], 0
            group.append(i)
            group_bytes += size
        if group:
            yield group

    def _storable(self, key: bytes, size: int) -> bool:
        longest = self._environment.longest_key
        if not 0 < len(key) <= longest:
            self._failures.note("key", f"a key of {len(key)} bytes; LMDB takes 1 to {longest}")
        elif size > MOST_PAGE_BYTES:
            self._failures.note("page", f"a page of {size} bytes; the limit is {MOST_PAGE_BYTES}")
        elif self._config.capacity is not None and size > self._config.capacity:
            self._failures.note("page", f"a page of {size} bytes, more than the whole capacity")
        else:
            return True
        return False

    def _store_group(
        self,
        group: list[int],
        keys: Sequence[bytes],
        pages: Sequence[PageSpans],
        sizes: Sequence[int],
    ) -> list[int]:
        """The places of the pages that are stored: all of them, unless the store is full."""
        needed = sum(sizes[i] for i in group)
        for attempt in range(2):
            seen = self._environment.map_bytes
            try:
                return self._commit(group, keys, pages, sizes)
            except lmdb.MapFullError as error:
                full: Exception = error
                if attempt or not self._environment.grow(seen, 2 * needed + _SPARE_BYTES):
                    break
            except lmdb.Error as error:
                if not self._disk_is_full(error, needed):
                    raise
                full = error
                break
        if self._config.capacity is not None and self._evict(2 * needed):
            try:
                return self._commit(group, keys, pages, sizes)
            except lmdb.Error as error:
                if not self._disk_is_full(error, needed):
                    raise
        self._failures.note("full", full)
        return self._store_singly(group, keys, pages, sizes)

    def _store_singly(
        self,
        group: list[int],
        keys: Sequence[bytes],
        pages: Sequence[PageSpans],
        sizes: Sequence[int],
    ) -> list[int]:
        """What still fits, page by page."""
        stored: list[int] = []
        try:
            for i in group if len(group) > 1 else ():
                stored += self._commit([i], keys, pages, sizes)
        except lmdb.Error as error:
            if not self._disk_is_full(error, max(sizes)):
                raise
        return stored

    def _commit(
        self,
        group: list[int],
        keys: Sequence[bytes],
        pages: Sequence[PageSpans],
        sizes: Sequence[int],
    ) -> list[int]:
        """One transaction: all of it or, if it raises, nothing."""
        environment, capacity = self._environment, self._config.capacity
        used_ms = now_ms()
        stored: list[int] = []
        kept = set(self._kept)
        uses = self._recency.take()
        try:
            with environment.writing() as (txn, trees):
                changes = Changes(txn, trees, environment.page_bytes)
                for key, ms in uses:
                    changes.touch(key, ms)
                for i in group:
                    record = changes.record(keys[i])
                    if record is not None and record.holds(pages[i][0], sizes[i]):
                        if capacity is not None:
                            changes.touch(keys[i], used_ms)
                    else:
                        changes.drop(keys[i], record)
                        if capacity is not None:
                            excess = changes.totals.stored_bytes + sizes[i] - capacity
                            if excess > 0 and changes.evict(excess, kept) < excess:
                                continue
                        changes.put(keys[i], pages[i], used_ms, environment.scratch)
                    kept.add(keys[i])
                    stored.append(i)
                changes.finish()
        except BaseException:
            self._recency.give_back(uses)
            raise
        self._kept = kept
        return stored

    def _evict(self, wanted_bytes: int) -> bool:
        """Removes old pages, so that LMDB finds their room; False if there is none to be had.

        Pages freed by a transaction can be reused by the second one after it.
        """
        environment = self._environment
        try:
            with environment.writing() as (txn, trees):
                changes = Changes(txn, trees, environment.page_bytes)
                freed = changes.evict(wanted_bytes, self._kept)
                changes.finish()
            if freed:
                with environment.writing() as (txn, trees):
                    Changes(txn, trees, environment.page_bytes).finish(even_unchanged=True)
        except lmdb.Error as error:
            self._failures.note("evict", error)
            return False
        return freed > 0

    def _disk_is_full(self, error: lmdb.Error, needed: int) -> bool:
        """Whether a failed commit lacked room. A write that stops half way for lack of it is
        reported as an I/O error."""
        if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)):
            return True
        status = os.statvfs(self._environment.path)
        free = status.f_bavail * status.f_frsize
        return "Input/output" in str(error) and free < needed + _SPARE_BYTES
