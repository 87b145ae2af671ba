"""Staging: pages of short rows in one stretch, on their way to and from a backend.

Sixty-four short spans cost more as objects, in the checksum and in the vectored call than their
bytes cost to copy, and what was copied just now is still in the processor's cache
(docs/decisions/6-short-rows-are-copied.md has the figures).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .page import AnyPage, FlatSpans, PageSpans, ScatteredPage, as_spans

KEPT_BYTES = 32 << 20
"""Most memory of a thread; pages of a call that need more are moved in place. New memory for each
call would cost more than it saves."""


class Staged(FlatSpans):
    """A place in a thread's own memory, for one page."""


class Staging(threading.local):
    """A thread's own memory for the scattered pages of one call."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())
        self._lent = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """One call's use of it. A call in the middle of another gets other memory, for itself."""
        kept, within = self._memory, self._lent
        if within:
            self._memory = memoryview(bytearray())
        self._lent = True
        try:
            yield
        finally:
            self._lent = within
            if within:
                self._memory = kept

    def places(self, pages: Sequence[AnyPage]) -> list[PageSpans]:
        """Spans for a backend: the pages' own or, of scattered pages, Staged ones, which are the
        caller's until this thread's next call."""
        needed = sum(page.length_bytes for page in pages if isinstance(page, ScatteredPage))
        if needed > KEPT_BYTES:
            return [as_spans(page) for page in pages]
        if needed > len(self._memory):
            self._memory = memoryview(bytearray(needed))
        found: list[PageSpans] = []
        start = 0
        for page in pages:
            if isinstance(page, ScatteredPage):
                end = start + page.length_bytes
                place = Staged((self._memory[start:end],))
                place.length_bytes = page.length_bytes
                found.append(place)
                start = end
            else:
                found.append(page)
        return found

    def in_a_row(self, page: AnyPage, place: PageSpans) -> PageSpans:
        """What lies at the page's place, for a checksum: of a scattered page that is moved in
        place a copy, until this thread's next call."""
        length = page.length_bytes if isinstance(page, ScatteredPage) else 0
        if type(place) is Staged or not 0 < length <= KEPT_BYTES:
            return place
        if length > len(self._memory):
            self._memory = memoryview(bytearray(length))
        page.gather(self._memory[:length])  # type: ignore[union-attr]
        return (self._memory[:length],)


def gathered(page: AnyPage, place: PageSpans) -> PageSpans:
    """The page's bytes at its place, copied there if it is staged."""
    if type(place) is Staged:
        page.gather(place[0])  # type: ignore[union-attr]
    return place


def scatter(place: PageSpans, page: AnyPage) -> None:
    """Copies what is at the place to the page, if it is staged."""
    if type(place) is Staged:
        page.scatter(place[0])  # type: ignore[union-attr]
