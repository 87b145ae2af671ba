"""file://: pages as files in a directory that any number of processes share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from ...errors import BackendError
from ...hookspecs import StoredPage, Usage, hookimpl
from ...page import PageSpans
from .config import FileConfig
from .durability import sync_file_system
from .faults import translated
from .names import NAMESPACE_NAME
from .reading import Reading
from .removing import Removing
from .root import require
from .session import READ_BY_THREADS_BYTES, THREADS, WRITTEN_BY_THREADS_BYTES, Session
from .walk import pages
from .writing import Writing

CALL_BYTES = 2 << 20
"""What one call takes on for each thread: little enough for a processor's caches, enough to hide
its own cost."""


class FileBackend:
    """One file a page. Safe between threads, processes and after a fork.

    A page is written under a temporary name and renamed, so readers see it whole or not at all.
    Trouble with one page is a miss or False, logged at a limited rate; BackendUnavailable is
    raised when the root as a whole is gone.
    """

    Config = FileConfig
    scope = "shared"

    def __init__(self, config: FileConfig) -> None:
        self._config = config
        threads = config.io_threads or THREADS
        # Directories are synced once a call.
        self.call_bytes = CALL_BYTES * threads if config.durability == "none" else None
        self._session: Session | None = None
        self._renewing = threading.Lock()

    @hookimpl
    def open(self) -> None:
        self._session = Session(self._config)

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        session = self._here()
        if not session.may_write:
            session.failures.note("write", session.refusal)
            return [False] * len(keys)
        return session.spread(
            lambda k, p: Writing(session).run(k, p), keys, pages, WRITTEN_BY_THREADS_BYTES
        )

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        session = self._here()
        answers = session.spread(
            lambda k, b: Reading(session).run(k, b), keys, buffers, READ_BY_THREADS_BYTES
        )
        if not all(answers):
            require(session.root.path)
        return answers

    @hookimpl
    def exists(self, keys: list[str]) -> int:
        session = self._here()
        run = Reading(session).leading_run(keys)
        if run < len(keys):
            require(session.root.path)
        return run

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        session = self._here()
        answers = Removing(session).run(keys)
        require(session.root.path)
        return answers

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        session = self._here()
        require(session.root.path)
        namespace = prefix[:32] if NAMESPACE_NAME.fullmatch(prefix[:32]) else ""
        with translated("scan"):
            for page in pages(session.root.path, namespace):
                if page.key.startswith(prefix):
                    yield StoredPage(page.key, page.stored_bytes, page.used_ns / 1e9)

    @hookimpl
    def usage(self) -> Usage:
        session = self._here()
        require(session.root.path)
        with translated("usage"):
            balance, capacity = session.space.balance(), self._config.capacity
            # In the middle of a write, of a recount or after a kill the ledger may say too much;
            # then the files say it.
            if balance is not None and capacity and not balance.in_flight:
                total = balance.total
                if total.stored_bytes <= capacity:
                    return Usage(total.pages, total.stored_bytes, capacity)
            sizes = [page.stored_bytes for page in pages(session.root.path)]
            return Usage(len(sizes), sum(sizes), None if balance is None else capacity)

    @hookimpl
    def flush(self) -> None:
        session = self._here()
        if session.may_write and not session.syncs:
            with translated("flush"):
                sync_file_system(session.root.path)

    @hookimpl
    def clear(self) -> None:
        session = self._here()
        if not session.may_write:
            raise BackendError(session.refusal, backend="file", operation="clear")
        require(session.root.path)
        with translated("clear"):
            Removing(session).clear()

    @hookimpl
    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.pid == os.getpid():
            session.close()

    def _here(self) -> Session:
        """This process's session; a forked child gets one of its own."""
        session = self._session
        if session is None:
            raise BackendError("not open", backend="file", operation="access")
        if session.pid != os.getpid():
            with self._renewing:
                if self._session is session:
                    self._session = Session(self._config)
                session = self._here()
        return session
