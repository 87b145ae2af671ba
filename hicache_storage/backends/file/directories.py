"""Directories: the shard directories that pages lie in, checked once and made when missing."""

from __future__ import annotations

import errno
import os
import stat

from .root import require
from .transfer import sync_directory


class Directories:
    """Remembers which directories under a root are real ones. Thread-safe."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: set[str] = set()

    def check(self, place: str) -> str:
        """The path of the directory `place` ("<namespace>/<shard>").

        Raises FileNotFoundError if there is none, and OSError (ELOOP) if a link stands in its
        way: what a link points to isn't ours.
        """
        path = f"{self._root}/{place}"
        if place not in self._known:
            for part in (os.path.dirname(path), path):
                mode = os.lstat(part).st_mode
                if not stat.S_ISDIR(mode):
                    number = errno.ELOOP if stat.S_ISLNK(mode) else errno.ENOTDIR
                    raise OSError(number, "not a directory of this store", part)
            self._known.add(place)
        return path

    def make(self, place: str, *, sync: bool) -> str:
        """As `check`, but makes what is missing, in the root only: never the root itself.

        With `sync` a new directory survives a power cut. Raises BackendUnavailable if the root is
        gone.
        """
        try:
            return self.check(place)
        except FileNotFoundError:
            pass
        require(self._root)
        parent = self._root
        for part in place.split("/"):
            path = f"{parent}/{part}"
            try:
                os.mkdir(path)
            except FileExistsError:
                pass
            else:
                if sync:
                    sync_directory(parent)
            parent = path
        return self.check(place)

    def forget(self, place: str) -> None:
        """Looks at the directory anew next time."""
        self._known.discard(place)

    def forget_all(self) -> None:
        self._known.clear()
