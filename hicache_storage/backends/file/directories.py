"""Directories: the shard directories that pages lie in, checked once and made when missing."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

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
            self._verify(path)
            self._known.add(place)
        return path

    def make(self, place: str, *, sync: bool) -> str:
        """As `check`, but makes what is missing, in the root only: never the root itself.

        With `sync` the directory survives a power cut, whoever made it. Raises BackendUnavailable
        if the root is gone.
        """
        path = f"{self._root}/{place}"
        if place not in self._known:
            namespace = os.path.dirname(path)
            try:
                self._verify(path)
            except FileNotFoundError:
                require(self._root)
                for missing in (namespace, path):
                    with suppress(FileExistsError):
                        os.mkdir(missing)
                self._verify(path)
            if sync:
                sync_directory(namespace)
                sync_directory(self._root)
            self._known.add(place)
        return path

    def forget(self, place: str) -> None:
        """Looks at the directory anew next time."""
        self._known.discard(place)

    def forget_all(self) -> None:
        self._known.clear()

    def _verify(self, path: str) -> None:
        for part in (os.path.dirname(path), path):
            mode = os.lstat(part).st_mode
            if not stat.S_ISDIR(mode):
                number = errno.ELOOP if stat.S_ISLNK(mode) else errno.ENOTDIR
                raise OSError(number, "not a directory of this store", part)
