"""lmdb://: the hooks, over one shared environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lmdb

from ...errors import BackendError, HiCacheStorageError
from ...failures import FailureLog
from ...hookspecs import StoredPage, Usage, hookimpl
from ...page import PageSpans, spans_bytes
from ...parts import PartOf
from ..lending import THREADS, Lending, cut
from .config import LmdbConfig
from .environment import Environment
from .judging import note_suspect
from .reading import read_pages, slices
from .recency import Recency
from .records import Changes, Inconsistent, Record, read_totals
from .sharing import acquire, release
from .writing import Batch, Writer

LOOKUP_PAGES = 4096
SCAN_PAGES = 512
DROP_PAGES = 256
"""Most that one transaction looks up, lists or deletes."""
BY_THREADS_BYTES = 1 << 20
"""Page size from which on a batch is read by THREADS, PART_BYTES at a time: two are 1.2 times as
fast as one with 1 MiB, 1.3 times with 8 MiB, but 0.8 times with 256 KiB."""
PART_BYTES = 4 << 20
WRITTEN_BYTES = 8 << 20
"""Of large pages, most that a part of a batch writes. Rows of 128 KiB that are stored one by one
give the interpreter lock up for each of them."""
_DAMAGE = (Inconsistent, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.CursorFullError)


class LmdbBackend:
    """Pages in the LMDB environment of a directory, shared by all processes of a host."""

    Config = LmdbConfig
    scope = "shared"

    def __init__(self, config: LmdbConfig) -> None:
        self.config = config
        self.failures = FailureLog(f"lmdb store {config.path}")
        self._recency = Recency(config.recency_s)
        self._environment: Environment | None = None
        self._part_of = PartOf[Batch]()
        self._lending = Lending("hicache-lmdb", THREADS, self.failures)

    @property
    def environment(self) -> Environment:
        """The open environment, which other stores of this process may share."""
        if self._environment is None:
            raise BackendError("the store is not open", backend="lmdb", operation="use")
        return self._environment

    # -- pages -------------------------------------------------------------------------------

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        if self.config.read_only:
            self.failures.note("set", "the store is read_only")
            return [False] * len(keys)
        with self._translated("batch_set"):
            names = [key.encode() for key in keys]
            batch = self._part_of.batch or Batch()
            return Writer(
                self.environment, self.config, self._recency, self.failures, batch, names, pages
            ).store()

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        with self._translated("batch_get"):
            answers = self._get([key.encode() for key in keys], buffers)
            self._settle_recency()
        return answers

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        """For Store: few pages are moved at a time, so that they pass through its memory, each in
        one copy. Large ones are read by several threads; writers would wait for each other."""
        if hook == "batch_set":
            large = page_bytes >= BY_THREADS_BYTES
            step = WRITTEN_BYTES // page_bytes if large else count
            self._write(cut(count, max(step, 1)), work)
        elif page_bytes < BY_THREADS_BYTES:
            self._lending.serve(list(slices([page_bytes] * count)), count, work, 1)
        else:
            step = max(min(-(-count // THREADS), PART_BYTES // page_bytes), 1)
            self._lending.serve(cut(count, step), count, work, min(THREADS, count))

    def _write(self, parts: Sequence[slice], work: Callable[[slice], None]) -> None:
        """The parts of a batch, one after the other."""
        write = self._part_of.of(Batch(), work)
        for part in parts:
            write(part)

    @hookimpl
    def exists(self, keys: list[str]) -> int:
        with self._translated("exists"):
            for start in range(0, len(keys), LOOKUP_PAGES):
                with self._cursor() as cursor:
                    for i in range(start, min(start + LOOKUP_PAGES, len(keys))):
                        if not cursor.set_key(keys[i].encode()):
                            return i
        return len(keys)

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        names = [key.encode() for key in keys]
        with self._translated("delete"):
            if self.config.read_only:
                self.failures.note("delete", "the store is read_only")
                with self.environment.reading() as (txn, trees):
                    return [txn.get(name, db=trees.pages) is None for name in names]
            for start in range(0, len(names), DROP_PAGES):
                self._drop(names[start : start + DROP_PAGES])
        return [True] * len(keys)

    # -- the whole store ---------------------------------------------------------------------

    @hookimpl
    def open(self) -> None:
        with self._translated("open"):
            self._environment = acquire(self.config.path, self.config)
        self._lending = Lending("hicache-lmdb", THREADS, self.failures)

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        """In the order of keys. Each part is read in a transaction of its own, so that a slow
        caller holds nothing up."""
        start, begin = prefix.encode(), prefix.encode()
        while True:
            with self._translated("scan"):
                found = self._scan_part(start, begin)
            for key, record in found:
                yield StoredPage(key.decode(), record.page_bytes, record.used_ms / 1000)
            if len(found) < SCAN_PAGES:
                return
            start = found[-1][0] + b"\0"

    @hookimpl
    def usage(self) -> Usage:
        with self._translated("usage"), self.environment.reading() as (txn, trees):
            pages = txn.stat(trees.pages)["entries"]
            return Usage(pages, read_totals(txn, trees).stored_bytes, self.config.capacity)

    @hookimpl
    def flush(self) -> None:
        if self.config.read_only:
            return
        with self._translated("flush"):
            self._settle_recency(everything=True)
            self.environment.sync()

    @hookimpl
    def clear(self) -> None:
        """In steps: other processes can write between them, and what they write may stay."""
        if self.config.read_only:
            raise BackendError("the store is read_only", backend="lmdb", operation="clear")
        with self._translated("clear"):
            after = b""
            while found := self._scan_part(after, b"", DROP_PAGES):
                self._drop([key for key, _ in found])
                after = found[-1][0]

    @hookimpl
    def close(self) -> None:
        environment, self._environment = self.environment, None
        self._lending.close()
        try:
            with self._translated("close"):
                if not self.config.read_only:
                    self._write_recency(environment, everything=True)
                    if self.config.durability == "async":
                        environment.sync()
        finally:
            release(environment)

    # -- inside ------------------------------------------------------------------------------

    def _get(self, keys: Sequence[bytes], buffers: Sequence[PageSpans]) -> list[bool]:
        answers: list[bool] = []
        notes_use = self.config.capacity is not None and not self.config.read_only
        environment = self.environment
        sizes = [spans_bytes(spans) for spans in buffers]
        for part in slices(sizes):
            with environment.reading() as (txn, trees):
                used = read_pages(
                    txn,
                    trees,
                    environment.data_fd,
                    environment.page_bytes,
                    keys[part],
                    buffers[part],
                    sizes[part],
                )
            answers += [used_ms is not None for used_ms in used]
            if notes_use:
                for key, used_ms in zip(keys[part], used, strict=True):
                    if used_ms is not None:
                        self._recency.used(key, used_ms)
        return answers

    def _scan_part(
        self, start: bytes, prefix: bytes, most: int = SCAN_PAGES
    ) -> list[tuple[bytes, Record]]:
        """Up to `most` entries from the key `start` on, all with the prefix."""
        found: list[tuple[bytes, Record]] = []
        with self._cursor() as cursor:
            more = cursor.set_range(start) if start else cursor.first()
            while more and len(found) < most:
                key = bytes(cursor.key())
                if not key.startswith(prefix):
                    break
                found.append((key, Record.parse(bytes(cursor.value()))))
                more = cursor.next()
        return found

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        with self.environment.reading() as (txn, trees), txn.cursor(db=trees.pages) as cursor:
            yield cursor

    def _drop(self, keys: Sequence[bytes]) -> None:
        """Deletes up to DROP_PAGES pages. A full map doesn't stand in the way of making room."""
        for _ in range(2):
            seen = self.environment.map_bytes
            try:
                with self.environment.writing() as (txn, trees):
                    changes = Changes(txn, trees, self.environment.page_bytes)
                    for key in keys:
                        changes.drop(key)
                    changes.finish()
                return
            except lmdb.MapFullError:
                if not self.environment.grow(seen, 1 << 20):
                    raise

    def _settle_recency(self, *, everything: bool = False) -> None:
        if self._recency.due or (everything and self._recency.pending):
            self._write_recency(self.environment, everything=everything)

    def _write_recency(self, environment: Environment, *, everything: bool) -> None:
        """Notes last uses. They are worth no error: a full store keeps the older ones."""
        while uses := self._recency.take():
            try:
                with environment.writing() as (txn, trees):
                    changes = Changes(txn, trees, environment.page_bytes)
                    for key, used_ms in uses:
                        changes.touch(key, used_ms)
            except (lmdb.Error, BackendError) as error:
                self.failures.note("recency", error)
                return
            if not everything:
                return

    @contextmanager
    def _translated(self, operation: str) -> Iterator[None]:
        """Makes errors of the client errors of this package, in this one place."""
        try:
            yield
        except HiCacheStorageError:
            raise
        except _DAMAGE as error:
            note_suspect(os.path.realpath(self.config.path))
            raise BackendError(
                f"{self.config.path} is damaged ({error}); the next opening checks it, and "
                "replaces it if that proves true",
                backend="lmdb",
                operation=operation,
            ) from error
        except (lmdb.Error, OSError) as error:
            raise BackendError(
                f"{self.config.path}: {error}", backend="lmdb", operation=operation
            ) from error
