"""Waiting for a whole file system to be on the disk."""

from __future__ import annotations

import ctypes
import os


def sync_file_system(path: str) -> None:
    """Returns once everything written to the file system of `path` so far is on the disk.

    One call for all pages, whoever wrote them. Raises OSError if the disk failed to take some
    of it. Where the C library has no syncfs, all file systems are synced.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        os.sync()
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(fd)
