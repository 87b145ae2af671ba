"""sqlite://: KV-cache pages in one SQLite file."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hicache_storage import BackendUnavailable, PageSpans, StoredPage, Usage, hookimpl
from hicache_storage.config import option


@dataclass(frozen=True)
class SqliteConfig:
    """Options of sqlite://."""

    path: str = option(url="location", doc="The database file; created if missing.")


class SqliteBackend:
    """Pages as rows of one table. A connection a call, so that threads and forks don't matter."""

    Config = SqliteConfig

    def __init__(self, config: SqliteConfig) -> None:
        self._path = config.path

    @hookimpl
    def open(self) -> None:
        with self._transaction("open") as database:
            database.execute("CREATE TABLE IF NOT EXISTS pages (key TEXT PRIMARY KEY, page BLOB)")

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        rows = [(key, b"".join(page)) for key, page in zip(keys, pages, strict=True)]
        with self._transaction("batch_set") as database:
            database.executemany("INSERT OR REPLACE INTO pages VALUES (?, ?)", rows)
        return [True] * len(keys)

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        with self._transaction("batch_get") as database:
            select = "SELECT page FROM pages WHERE key = ?"
            rows = [database.execute(select, (key,)).fetchone() for key in keys]
        return [
            row is not None and _fill(spans, row[0])
            for row, spans in zip(rows, buffers, strict=True)
        ]

    @hookimpl
    def exists(self, keys: list[str]) -> int:
        with self._transaction("exists") as database:
            select = "SELECT 1 FROM pages WHERE key = ?"
            there = (database.execute(select, (key,)).fetchone() for key in keys)
            return next((i for i, row in enumerate(there) if row is None), len(keys))

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        with self._transaction("delete") as database:
            database.executemany("DELETE FROM pages WHERE key = ?", [(key,) for key in keys])
        return [True] * len(keys)

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        with self._transaction("scan") as database:
            select = "SELECT key, length(page) FROM pages WHERE substr(key, 1, ?) = ?"
            rows = database.execute(select, (len(prefix), prefix)).fetchall()
        return iter([StoredPage(key, size) for key, size in rows])

    @hookimpl
    def usage(self) -> Usage:
        with self._transaction("usage") as database:
            select = "SELECT count(*), coalesce(sum(length(page)), 0) FROM pages"
            return Usage(*database.execute(select).fetchone())

    @contextmanager
    def _transaction(self, operation: str) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self._path, timeout=30)
        try:
            with database:
                yield database
        except sqlite3.OperationalError as error:
            raise BackendUnavailable(str(error), backend="sqlite", operation=operation) from error
        finally:
            database.close()


def _fill(spans: PageSpans, page: bytes) -> bool:
    """Copies a page into its spans; False if it has another length."""
    if len(page) != sum(map(len, spans)):
        return False
    start = 0
    for span in spans:
        span[:] = page[start : start + len(span)]
        start += len(span)
    return True
