"""Removing: `delete` and `clear`."""

from __future__ import annotations

import os
from contextlib import suppress

from .faults import kind_of
from .ledger import Amount
from .names import page_place
from .session import Session
from .walk import pages, shard_directories


class Removing:
    """Removes pages one after the other. Used once, by one thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._mark = session.space.mark()
        self._removed_bytes = 0
        self._removed_pages = 0

    def run(self, keys: list[str]) -> list[bool]:
        """True for each key that isn't stored any more."""
        try:
            return [self._remove(key) for key in keys]
        finally:
            self._account()

    def clear(self) -> None:
        """Removes all pages, then directories that are empty. Temporary files stay: somebody
        writes them, or the next opening removes them."""
        root = self._session.root.path
        try:
            for page in pages(root):
                self._remove(page.key)
        finally:
            self._account()
        for _, _, directory in list(shard_directories(root)):
            with suppress(OSError):  # not empty: somebody writes there, or put a file there
                os.rmdir(directory)
                os.rmdir(os.path.dirname(directory))
        self._session.directories.forget_all()
        self._session.space.recount()

    def _remove(self, key: str) -> bool:
        place, name = page_place(key)
        try:
            path = f"{self._session.directories.check(place)}/{name}"
            status = os.lstat(path)
            if not self._session.may_write:
                return False
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._session.failures.note(kind_of("delete", error), error)
            return False
        self._removed_bytes += status.st_size
        self._removed_pages += 1
        return True

    def _account(self) -> None:
        if self._removed_pages:
            removed = Amount(self._removed_bytes, self._removed_pages)
            self._session.space.release(removed, self._mark)
