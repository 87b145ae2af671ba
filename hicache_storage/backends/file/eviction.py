"""Eviction: removes the pages that were used least recently. One process at a time does it."""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...keys import RECORD_TAG
from .ledger import Ledger
from .root import Root
from .walk import PageFile, TempFile, walk
from .writers import remove_if_orphan

MOST_PAGES = 1 << 18
"""Pages that one round removes at most: it keeps their names in memory."""
_SETTLE_EVERY = 32


@dataclass
class Found:
    """What a walk has met so far."""

    stored_bytes: int = 0
    pages: int = 0


class Scanner:
    """Walks over a root to recount the ledger and to find what to evict.

    What a dead writer left behind is removed on the way.
    """

    def __init__(self, root: Root, ledger: Ledger, temp_age_s: float) -> None:
        self._root = root
        self._ledger = ledger
        self._temp_age_s = temp_age_s

    def recount(self) -> None:
        """Makes the ledger say what is there."""
        with self._recounting() as pages:
            deque(pages, maxlen=0)

    def oldest_pages(self, most: int) -> list[PageFile]:
        """The `most` pages used least recently, oldest first; recounts on the way.

        A namespace's readable record goes after all pages.
        """
        with self._recounting() as pages:
            return heapq.nsmallest(most, pages, key=_order)

    @contextmanager
    def _recounting(self) -> Iterator[Iterator[PageFile]]:
        found = Found()
        number = self._ledger.begin_recount()
        yield self._counted(found)
        self._ledger.end_recount(number, found.stored_bytes, found.pages)

    def _counted(self, found: Found) -> Iterator[PageFile]:
        for one in walk(self._root.path):
            if isinstance(one, TempFile):
                remove_if_orphan(one, self._root.writers, self._temp_age_s)
                continue
            found.stored_bytes += one.stored_bytes
            found.pages += 1
            yield one


def remove_pages(candidates: Iterable[PageFile], ledger: Ledger, goal_bytes: int) -> int:
    """Removes pages in order until `goal_bytes` are free; the bytes that it removed.

    A page that was used or replaced since it was met stays. A page that is gone already counts
    for whoever removed it.
    """
    freed = unsettled_bytes = unsettled_pages = 0
    for page in candidates:
        if freed >= goal_bytes:
            break
        try:
            status = os.lstat(page.path)
            if status.st_mtime_ns != page.used_ns:
                continue
            os.unlink(page.path)
        except OSError:
            continue
        freed += status.st_size
        unsettled_bytes += status.st_size
        unsettled_pages += 1
        if unsettled_pages >= _SETTLE_EVERY:
            ledger.release(unsettled_bytes, unsettled_pages)
            unsettled_bytes = unsettled_pages = 0
    if unsettled_pages:
        ledger.release(unsettled_bytes, unsettled_pages)
    return freed


def _order(page: PageFile) -> tuple[bool, int]:
    return f"/{RECORD_TAG}:" in page.key, page.used_ns
