"""Walks over a root: every page and every temporary file, nothing foreign."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from .names import NAMESPACE_NAME, SHARD_NAME, TEMP_NAME, stored_key_at


class PageFile(NamedTuple):
    """A page met on a walk."""

    key: str
    path: str
    stored_bytes: int
    used_ns: int
    """Modification time: when it was last used, as far as that was recorded."""


class TempFile(NamedTuple):
    """A temporary file met on a walk."""

    path: str
    writer: str


def shard_directories(root: str, namespace: str = "") -> Iterator[tuple[str, str, str]]:
    """(namespace digest, shard, path) of every real shard directory; links are not followed.

    Raises OSError if the root itself can't be read.
    """
    spaces = [namespace] if namespace else _subdirectories(root, NAMESPACE_NAME)
    for digest in spaces:
        path = f"{root}/{digest}"
        with suppress(OSError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                for shard in _subdirectories(path, SHARD_NAME):
                    yield digest, shard, f"{path}/{shard}"


def walk(root: str, namespace: str = "") -> Iterator[PageFile | TempFile]:
    """Every page and temporary file under the root, or of one namespace.

    Files that come or go meanwhile may or may not be met. Directories that can't be read are
    passed over.
    """
    for digest, shard, directory in shard_directories(root, namespace):
        for entry in _entries(directory):
            found = _temp(entry) or _page(digest, shard, entry)
            if found is not None:
                yield found


def pages(root: str, namespace: str = "") -> Iterator[PageFile]:
    """The pages of a walk."""
    for found in walk(root, namespace):
        if isinstance(found, PageFile):
            yield found


def temps(root: str) -> Iterator[TempFile]:
    """The temporary files of a walk; quicker, as it looks only at names."""
    for _, _, directory in shard_directories(root):
        for entry in _entries(directory):
            found = _temp(entry)
            if found is not None:
                yield found


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(directory) as entries:
        yield from entries


def _temp(entry: os.DirEntry[str]) -> TempFile | None:
    match = TEMP_NAME.fullmatch(entry.name) if entry.name[0] == "." else None
    return TempFile(entry.path, match[1]) if match is not None else None


def _page(digest: str, shard: str, entry: os.DirEntry[str]) -> PageFile | None:
    key = stored_key_at(digest, shard, entry.name)
    if key is None:
        return None
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return PageFile(key, entry.path, status.st_size, status.st_mtime_ns)


def _subdirectories(path: str, name: re.Pattern[str]) -> list[str]:
    with os.scandir(path) as entries:
        return [
            entry.name
            for entry in entries
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
