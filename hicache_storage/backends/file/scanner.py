"""Scanner: walks over a root to count its pages and to find and remove those used longest ago."""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...keys import RECORD_TAG
from .ledger import Amount, Ledger
from .root import Root
from .walk import PageFile, TempFile, walk
from .writers import remove_if_orphan

_RELEASE_EVERY = 32


class Scanner:
    """Walks for whoever has the evictor's turn.

    Every walk recounts the ledger, and removes what dead writers left behind.
    """

    def __init__(self, root: Root, ledger: Ledger, temp_age_s: float) -> None:
        self._root = root
        self._ledger = ledger
        self._temp_age_s = temp_age_s
        self.took_s = 0.0
        """How long the latest walk took."""

    def recount(self) -> None:
        """Makes the ledger say what is there."""
        with self._recounting() as pages:
            deque(pages, maxlen=0)

    def oldest_pages(self, most: int) -> list[PageFile]:
        """The `most` pages used longest ago, in that order. A namespace's readable record comes
        after all pages."""
        with self._recounting() as pages:
            return heapq.nsmallest(most, pages, key=_order)

    def remove(self, candidates: Iterable[PageFile], goal_bytes: int) -> int:
        """Removes pages in order until `goal_bytes` are free; the bytes that it removed.

        A page that was used or replaced since it was met stays. A page that is gone already counts
        for whoever removed it.
        """
        mark = self._ledger.read().mark
        freed = 0
        removed: list[int] = []
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
            removed.append(status.st_size)
            if len(removed) >= _RELEASE_EVERY:
                self._ledger.release(Amount(sum(removed), len(removed)), mark)
                removed.clear()
        if removed:
            self._ledger.release(Amount(sum(removed), len(removed)), mark)
        return freed

    @contextmanager
    def _recounting(self) -> Iterator[Iterator[PageFile]]:
        start_s = time.monotonic()
        number = self._ledger.begin_recount()
        sizes: list[int] = [0, 0]
        yield self._counted(sizes)
        self._ledger.end_recount(number, Amount(*sizes))
        self.took_s = time.monotonic() - start_s

    def _counted(self, sizes: list[int]) -> Iterator[PageFile]:
        for one in walk(self._root.path):
            if isinstance(one, TempFile):
                remove_if_orphan(one, self._root.writers, self._temp_age_s)
                continue
            sizes[0] += one.stored_bytes
            sizes[1] += 1
            yield one


def _order(page: PageFile) -> tuple[bool, int]:
    return f"/{RECORD_TAG}:" in page.key, page.used_ns
