"""Writing: one thread's part of a `batch_set`."""

from __future__ import annotations

import os
import time

from ...page import HEADER_BYTES, PageSpans, spans_bytes
from .faults import FULL, VANISHED, kind_of
from .ledger import Amount, Reservation
from .names import page_place
from .root import require
from .session import Session
from .transfer import (
    close_quietly,
    mark_used,
    open_page,
    publish,
    read_header,
    sync_directory,
)


class Writing:
    """Stores pages one after the other. Used once, by one thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._now_s = time.time()
        self._looks = True
        """Whether the next page may well be stored already: not if the one before it was missing,
        as pages of a prefix come and go together. To look for each costs up to a tenth."""
        self._left_bytes = 0
        self._left_pages = 0
        self._room: Reservation | None = None
        self._room_bytes = 0
        self._added_bytes = 0
        self._added_pages = 0
        self._touched: set[str] = set()

    def run(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        """True for each page that is stored. Raises BackendUnavailable if the root is gone."""
        lengths = [spans_bytes(page) for page in pages]
        self._left_bytes, self._left_pages = sum(lengths), len(pages)
        try:
            answers = list(map(self._set, keys, pages, lengths))
        finally:
            self._settle()
        if self._session.syncs:
            return self._sync_directories(keys, answers)
        return answers

    def _set(self, key: str, page: PageSpans, length: int) -> bool:
        place, name = page_place(key)
        try:
            try:
                return self._store(place, name, page, length)
            except OSError as error:
                if not self._is_mended(error, place, length):
                    raise
                return self._store(place, name, page, length)
        except OSError as error:
            self._session.failures.note(kind_of("write", error), error)
            require(self._session.root.path)
            return False
        finally:
            self._left_bytes -= length
            self._left_pages -= 1

    def _store(self, place: str, name: str, page: PageSpans, length: int) -> bool:
        session = self._session
        directory = session.directories.make(place, sync=session.syncs)
        path = f"{directory}/{name}"
        if self._looks and self._is_stored(path, page, length):
            return True
        if not self._has_room(length):
            session.failures.note("write", f"no room for a page of {length} bytes")
            return False
        temp = f"{directory}/{session.temp_name()}"
        replaced_bytes = publish(temp, path, page, length, sync=session.syncs)
        self._looks = replaced_bytes > 0
        self._room_bytes -= length
        self._added_bytes += length - replaced_bytes
        self._added_pages += replaced_bytes == 0
        return True

    def _is_mended(self, error: OSError, place: str, length: int) -> bool:
        """Whether a second try has a chance, after what the first one failed of."""
        if error.errno in VANISHED:
            self._session.directories.forget(place)
            return True
        return error.errno in FULL and self._session.space.make_room(length)

    def _is_stored(self, path: str, page: PageSpans, length: int) -> bool:
        """Whether this very page, by its header, is there; then it counts as just used."""
        if not os.access(path, os.F_OK):  # costs half of an open that fails
            return False
        try:
            fd = open_page(path)
        except OSError:
            return False
        try:
            status = os.fstat(fd)
            same = status.st_size == length and len(page[0]) == HEADER_BYTES
            if not same or read_header(fd) != page[0]:
                return False
            if self._session.syncs:
                os.fsync(fd)
            if self._now_s - status.st_mtime >= self._session.config.recency_s:
                mark_used(fd)
            return True
        finally:
            close_quietly(fd)

    def _has_room(self, length: int) -> bool:
        if self._room_bytes >= length:
            return True
        self._settle()
        room = self._session.space.reserve(self._left_bytes, length, self._left_pages)
        if room is None:
            return False
        self._room, self._room_bytes = room, room.amount.stored_bytes
        return True

    def _settle(self) -> None:
        if self._room is not None:
            added = Amount(self._added_bytes, self._added_pages)
            self._session.space.settle(self._room, added)
        self._room = None
        self._room_bytes = self._added_bytes = self._added_pages = 0

    def _sync_directories(self, keys: list[str], answers: list[bool]) -> list[bool]:
        """Puts the new names on the disk, each directory once; False where that fails."""
        places = [page_place(key)[0] for key in keys]
        changed = {place for place, stored in zip(places, answers, strict=True) if stored}
        synced = {place for place in changed if self._is_synced(place)}
        return [stored and place in synced for place, stored in zip(places, answers, strict=True)]

    def _is_synced(self, place: str) -> bool:
        try:
            sync_directory(f"{self._session.root.path}/{place}")
        except OSError as error:
            self._session.failures.note(kind_of("sync", error), error)
            return False
        return True
