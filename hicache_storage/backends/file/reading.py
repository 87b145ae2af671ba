"""Reading: one thread's part of a `batch_get`, and the lookups of `exists`."""

from __future__ import annotations

import os
import stat
import time

from ...page import HEADER_BYTES, PageSpans, announced_bytes, spans_bytes
from .faults import VANISHED, kind_of
from .ledger import Amount
from .names import page_place
from .session import Session
from .transfer import close_quietly, mark_used, open_page, read_header, read_spans


class Reading:
    """Reads pages one after the other. Used once, by one thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recent_s = time.time() - session.config.recency_s
        self.failed = False
        """Whether anything but a hit was met, so that the root deserves a look."""

    def run(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        """True for each page that has arrived whole."""
        return [self._get(key, spans) for key, spans in zip(keys, buffers, strict=True)]

    def leading_run(self, keys: list[str]) -> int:
        """How many of the keys are stored before the first that isn't."""
        for number, key in enumerate(keys):
            if not self._is_stored(key):
                return number
        return len(keys)

    def _get(self, key: str, spans: PageSpans) -> bool:
        place, name = page_place(key)
        try:
            try:
                return self._read(place, name, spans)
            except OSError as error:
                if error.errno not in VANISHED:
                    raise
                # A network file system says so of a file that was replaced just now.
                self._session.directories.forget(place)
                return self._read(place, name, spans)
        except OSError as error:
            self.failed = True
            if error.errno not in VANISHED:
                self._session.failures.note(kind_of("read", error), error)
            return False

    def _read(self, place: str, name: str, spans: PageSpans) -> bool:
        path = f"{self._session.directories.check(place)}/{name}"
        wanted = spans_bytes(spans)
        fd = open_page(path)
        try:
            status = os.fstat(fd)
            if status.st_size == wanted and read_spans(fd, spans, wanted):
                if status.st_mtime <= self._recent_s and self._session.may_write:
                    mark_used(fd)
                return True
            self._drop_if_cut(path, fd, status)
            return False
        finally:
            close_quietly(fd)

    def _drop_if_cut(self, path: str, fd: int, status: os.stat_result) -> None:
        """Removes a page file that is proven not to be whole: shorter than a header, or not as
        long as its header says. A file of another length that agrees with its header stays, and so
        does whatever was published in its place meanwhile."""
        header = read_header(fd)
        whole = announced_bytes(header)
        if whole == status.st_size or (whole is None and len(header) == HEADER_BYTES):
            return
        self._session.failures.note("cut page", f"{path} has {status.st_size} bytes of {whole}")
        if not self._session.may_write or not stat.S_ISREG(status.st_mode):
            return
        now = os.lstat(path)
        same = (now.st_ino, now.st_dev, now.st_mtime_ns, now.st_size)
        if same == (status.st_ino, status.st_dev, status.st_mtime_ns, status.st_size):
            mark = self._session.space.mark()
            os.unlink(path)
            self._session.space.release(Amount(status.st_size, 1), mark)

    def _is_stored(self, key: str) -> bool:
        place, name = page_place(key)
        try:
            status = os.lstat(f"{self._session.directories.check(place)}/{name}")
        except OSError as error:
            self.failed = True
            if error.errno not in VANISHED:
                self._session.failures.note(kind_of("lookup", error), error)
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size >= HEADER_BYTES
