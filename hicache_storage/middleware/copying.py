"""CopyQueue: pages on their way from one tier to the other, in a bounded background queue."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from ..errors import HiCacheStorageError
from ..failures import FailureLog
from ..page import HEADER_BYTES, PageSpans, spans_bytes

Write = Callable[[list[str], list[PageSpans]], list[bool]]
BATCH_PAGES = 128
RETRY_S = 1.0


class CopyQueue:
    """Copies pages with `write`, oldest first, in a thread that starts with the first page.

    Holds private copies of at most `limit_bytes`. A batch whose write raises stays queued and is
    tried again every second; a page that is refused (False) is given up and counted in `lost`.
    Thread-safe. A forked child starts with an empty queue, since its parent still has the pages.
    """

    def __init__(self, name: str, limit_bytes: int, write: Write) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self.failures = FailureLog(name)
        self._write = write
        self._reset()

    def _reset(self) -> None:
        self.lost = 0
        self._lost_before = 0
        self._failed = 0
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._pages: OrderedDict[str, memoryview] = OrderedDict()
        self._bytes = 0
        self._writing: frozenset[str] = frozenset()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def queued_pages(self) -> int:
        """Pages that wait or are being written."""
        return len(self._pages)

    def put(self, key: str, page: PageSpans) -> bool:
        """Queues a copy of the page; False if there is no room for it."""
        if self._pid != os.getpid():
            self._reset()
        size = spans_bytes(page)
        with self._changed:
            after = self._bytes + size - len(self._pages.get(key, b""))
            if self._stopping or after > self.limit_bytes:
                return False
            self._pages[key] = memoryview(b"".join(page))
            self._bytes = after
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"hicache-storage-{self.name}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return True

    def read(self, key: str, buffers: PageSpans) -> bool:
        """Fills `buffers` with the page if it is queued."""
        if not self._pages:
            return False
        with self._changed:
            page = self._pages.get(key)
        if page is None or len(page) != spans_bytes(buffers):
            return False
        start = 0
        for span in buffers:
            span[:] = page[start : start + len(span)]
            start += len(span)
        return True

    def drop(self, keys: list[str] | None = None) -> None:
        """Forgets these pages, or all of them; returns when none of them is being written."""
        with self._changed:
            for key in list(self._pages) if keys is None else keys:
                self._remove(key)
            gone = self._writing if keys is None else self._writing.intersection(keys)
            self._changed.wait_for(lambda: self._writing.isdisjoint(gone))

    def drain(self, timeout_s: float | None) -> int:
        """Waits until nothing is queued; returns how many pages are still queued or were lost
        since the last call.

        With `timeout_s` None it waits as long as writes succeed, and gives up when one raises.
        """
        with self._changed:
            failed_before = self._failed
            self._changed.wait_for(
                lambda: not self._pages or (timeout_s is None and self._failed > failed_before),
                timeout_s,
            )
            lost, self._lost_before = self.lost - self._lost_before, self.lost
            return lost + len(self._pages)

    def stop(self) -> None:
        """Ends the thread; pages that are still queued are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and self._pid == os.getpid():
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pages or self._stopping)
                if self._stopping:
                    return
                batch = dict(itertools.islice(self._pages.items(), BATCH_PAGES))
                pages: list[PageSpans] = [
                    (page[:HEADER_BYTES], page[HEADER_BYTES:]) for page in batch.values()
                ]
                self._writing = frozenset(batch)
            stored: list[bool] | None
            try:
                stored = self._write(list(batch), pages)
            except HiCacheStorageError as error:
                self.failures.note("write", error)
                stored = None
            self._settle(batch, stored)

    def _settle(self, batch: dict[str, memoryview], stored: list[bool] | None) -> None:
        with self._changed:
            self._writing = frozenset()
            if stored is None:
                self._failed += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping, RETRY_S)
                return
            for (key, page), done in zip(batch.items(), stored, strict=True):
                if self._pages.get(key) is page:  # else it was replaced or dropped meanwhile
                    self._remove(key)
                    self.lost += not done
            self._changed.notify_all()

    def _remove(self, key: str) -> None:
        self._bytes -= len(self._pages.pop(key, b""))
