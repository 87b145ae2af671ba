"""Writer: stores a batch in few transactions, and makes room where it lacks."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

import lmdb

from ...failures import FailureLog
from ...page import PageSpans, spans_bytes
from .config import LmdbConfig
from .environment import Environment
from .judging import DATA, lengthen
from .recency import Recency, now_ms
from .records import MOST_PAGE_BYTES, Changes

ASYNC_COMMIT_BYTES = 8 << 20
"""Most bytes of one commit that doesn't wait for the disk. Beyond it the allocator gives the
memory back after each commit and takes it anew: a third of the speed."""
SYNC_COMMIT_BYTES = 64 << 20
"""Most bytes of one commit that waits for the disk, which bounds memory and how long other
writers wait."""
_SPARE_BYTES = 1 << 20
_ATTEMPTS = 4
"""Of storing pages in a map that is full: readers that died are cleared away, another process
takes the new room, and only then does growing again make no sense."""
_NO_ROOM_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ROOM = tuple(map(os.strerror, _NO_ROOM_CODES))


class Batch:
    """What the parts of a batch have in common."""

    def __init__(self) -> None:
        self.kept: set[bytes] = set()
        """Keys that it stored, or found stored: it doesn't evict them for its own rest."""
        self.full = False
        """The store has no room for a page of it, and so none for the rest."""


class Writer:
    """Stores one batch, or a part of it; made for it."""

    def __init__(
        self,
        environment: Environment,
        config: LmdbConfig,
        recency: Recency,
        failures: FailureLog,
        batch: Batch,
        keys: Sequence[bytes],
        pages: Sequence[PageSpans],
    ) -> None:
        self._environment = environment
        self._config = config
        self._recency = recency
        self._failures = failures
        self._batch = batch
        self._keys = keys
        self._pages = pages
        self._sizes = [spans_bytes(page) for page in pages]

    def store(self) -> list[bool]:
        """True for each page that is stored."""
        answers = [False] * len(self._keys)
        for group in self._groups():
            if self._batch.full:
                break
            stored = self._store_group(group)
            for i in stored:
                answers[i] = True
            self._batch.full = len(stored) < len(group)
        return answers

    def _groups(self) -> Iterator[list[int]]:
        """The places of pages that can be stored at all, as many together as one commit takes."""
        waits = self._config.durability != "async"
        most = SYNC_COMMIT_BYTES if waits else ASYNC_COMMIT_BYTES
        group: list[int] = []
        group_bytes = 0
        for i, (key, size) in enumerate(zip(self._keys, self._sizes, strict=True)):
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

    def _store_group(self, group: list[int]) -> list[int]:
        """The places of the pages that are stored: all of them, unless the store is full."""
        needed = sum(self._sizes[i] for i in group)
        for _ in range(_ATTEMPTS):
            seen = self._environment.map_bytes
            try:
                return self._commit(group)
            except lmdb.MapFullError as error:
                full: Exception = error
                if not self._environment.grow(seen, 2 * needed + _SPARE_BYTES):
                    break
            except lmdb.Error as error:
                if not self._no_room(error):
                    raise
                full = error
                break
        if self._config.capacity is not None and self._evict(2 * needed):
            try:
                return self._commit(group)
            except lmdb.Error as error:
                if not self._no_room(error):
                    raise
        self._failures.note("full", full)
        return self._store_singly(group)

    def _store_singly(self, group: list[int]) -> list[int]:
        """What still fits, page by page."""
        stored: list[int] = []
        try:
            for i in group if len(group) > 1 else ():
                stored += self._commit([i])
        except lmdb.Error as error:
            if not self._no_room(error):
                raise
        return stored

    def _commit(self, group: list[int]) -> list[int]:
        """One transaction: all of it or, if it raises, nothing."""
        environment = self._environment
        stored: list[int] = []
        kept = set(self._batch.kept)
        uses = self._recency.take()
        try:
            with environment.writing() as (txn, trees):
                changes = Changes(txn, trees, environment.page_bytes)
                used_ms = now_ms()  # not before: others may have written while this one waited
                for key, ms in uses:
                    changes.touch(key, ms)
                for i in group:
                    if self._put(changes, i, used_ms, kept):
                        kept.add(self._keys[i])
                        stored.append(i)
                changes.finish()
        except BaseException:
            self._recency.give_back(uses)
            raise
        self._batch.kept = kept
        return stored

    def _put(self, changes: Changes, i: int, used_ms: int, kept: set[bytes]) -> bool:
        """Puts a page, unless it is there already; False if the capacity has no room for it."""
        key, page, size = self._keys[i], self._pages[i], self._sizes[i]
        capacity = self._config.capacity
        record = changes.record(key)
        if record is not None and record.holds(page[0], size):
            if capacity is not None:
                changes.touch(key, used_ms)
            return True
        if record is not None:
            changes.drop(key, record)
        if capacity is not None:
            excess = changes.totals.stored_bytes + size - capacity
            if excess > 0 and changes.evict(excess, kept) < excess:
                return False
        changes.put(key, page, used_ms, self._environment.scratch)
        return True

    def _evict(self, wanted_bytes: int) -> bool:
        """Removes old pages, so that LMDB finds their room; False if there is none to be had.

        Pages freed by a transaction can be reused by the second one after it.
        """
        environment = self._environment
        try:
            with environment.writing() as (txn, trees):
                changes = Changes(txn, trees, environment.page_bytes)
                freed = changes.evict(wanted_bytes, self._batch.kept)
                changes.finish()
            if freed:
                with environment.writing() as (txn, trees):
                    Changes(txn, trees, environment.page_bytes).finish(even_unchanged=True)
        except lmdb.Error as error:
            self._failures.note("evict", error)
            return False
        return freed > 0

    def _no_room(self, error: lmdb.Error) -> bool:
        """Whether a commit failed for lack of room. A write that stops half way for lack of it
        is reported as an I/O error."""
        if isinstance(error, lmdb.MapFullError) or any(text in str(error) for text in _NO_ROOM):
            return True
        return os.strerror(errno.EIO) in str(error) and self._at_an_end()

    def _at_an_end(self) -> bool:
        """Whether the disk, a quota or a limit keeps the data file from growing."""
        fd = os.open(f"{self._environment.path}/{DATA}", os.O_RDWR | os.O_CLOEXEC)
        try:
            lengthen(fd, os.fstat(fd).st_size, max(self._sizes) + _SPARE_BYTES)
        except OSError as error:
            return error.errno in _NO_ROOM_CODES
        finally:
            os.close(fd)
        return False
