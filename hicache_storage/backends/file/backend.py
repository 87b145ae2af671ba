"""file://: pages as files in a directory that any number of processes share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from ...errors import BackendError
from ...hookspecs import StoredPage, Usage, hookimpl
from ...page import PageSpans, spans_bytes
from .config import FileConfig
from .durability import sync_file_system
from .faults import translated
from .ledger import Amount
from .names import NAMESPACE_NAME
from .reading import Reading
from .removing import Removing
from .root import require
from .session import Session
from .walk import pages
from .writing import Writing


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
        return self._answers("batch_set", keys, pages, Writing)

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        answers = self._answers("batch_get", keys, buffers, Reading)
        if not all(answers):
            require(self._here().root.path)
        return answers

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        """For Store, whose checksums and copies are spread over the threads too."""
        self._here().spread(hook, page_bytes, count, work)

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
            balance = session.space.balance()
            capacity = None if balance is None else self._config.capacity
            held = None
            if balance is not None and balance.total.stored_bytes <= (capacity or 0):
                held = balance.total
            if balance is None or held is None or balance.in_flight:
                # In the middle of a write, of a recount or after a kill the ledger may say too
                # much; then the files say it. A walk meets pages that are evicted behind it and
                # those that take their room ahead, but the ledger never says too little.
                sizes = [page.stored_bytes for page in pages(session.root.path)]
                found = Amount(sum(sizes), len(sizes))
                held = found if held is None else Amount(*map(min, found, held))
            return Usage(held.pages, held.stored_bytes, capacity)

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

    def _answers(
        self, hook: str, keys: list[str], pages: list[PageSpans], kind: type[Reading | Writing]
    ) -> list[bool]:
        session = self._here()
        if not keys:
            return []
        answers = [False] * len(keys)

        def work(part: slice) -> None:
            answers[part] = kind(session).run(keys[part], pages[part])

        session.spread(hook, spans_bytes(pages[0]), len(keys), work)
        return answers

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
