"""Eviction: removes the pages that were used least recently. One process at a time does it."""

from __future__ import annotations

import fcntl
import heapq
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...keys import RECORD_TAG
from .ledger import Ledger
from .walk import PageFile, pages

MOST_PAGES = 1 << 18
"""Pages that one round removes at most: it keeps their names in memory."""
_SETTLE_EVERY = 32


class EvictorLock:
    """The turn to evict from a root; one process at a time has it. Make another after a fork."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    @contextmanager
    def attempt(self) -> Iterator[bool]:
        """Takes the turn if nobody has it, and gives it back at the end; says whether."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            # Explicitly: a forked child may hold the same open file.
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)


def recount(root: str, ledger: Ledger) -> None:
    """Makes the ledger say what is there."""
    number = ledger.begin_recount()
    found_bytes = found_pages = 0
    for page in pages(root):
        found_bytes += page.stored_bytes
        found_pages += 1
    ledger.end_recount(number, found_bytes, found_pages)


def oldest_pages(root: str, ledger: Ledger, most: int) -> list[PageFile]:
    """The `most` pages used least recently, oldest first; recounts on the way.

    A namespace's readable record goes after all pages.
    """
    number = ledger.begin_recount()
    found_bytes = found_pages = 0

    def counted() -> Iterator[PageFile]:
        nonlocal found_bytes, found_pages
        for page in pages(root):
            found_bytes += page.stored_bytes
            found_pages += 1
            yield page

    oldest = heapq.nsmallest(most, counted(), key=_order)
    ledger.end_recount(number, found_bytes, found_pages)
    return oldest


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
