"""One page, one file: written under a temporary name and published whole; read in place.

Bytes go straight between the caller's spans and the kernel, with vectored calls.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress

from ...page import HEADER_BYTES, PageSpans
from .renaming import put_in_place

IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024) if os.sysconf("SC_IOV_MAX") > 0 else 16
"""Most spans that one call takes."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def open_page(path: str) -> int:
    """A descriptor of the page file; follows no link and never waits on a FIFO.

    The time of access, which nobody needs, is left alone where that is allowed: to write it costs
    a twentieth of reading a small page.
    """
    try:
        return os.open(path, _READ | os.O_NOATIME)
    except PermissionError:  # the page is another user's
        return os.open(path, _READ)


def close_quietly(fd: int) -> None:
    """Closes a descriptor that was only read from: no error of that spoils what was read."""
    try:  # noqa: SIM105 - twice as fast as suppress, once a page
        os.close(fd)
    except OSError:
        pass


def mark_used(fd: int) -> None:
    """Makes now the time of the page's last use, as far as its owner allows that."""
    with suppress(OSError):
        os.utime(fd)


def write_spans(fd: int, spans: Sequence[memoryview], wanted: int) -> None:
    """Writes all spans, `wanted` bytes in all, from the start of the file."""
    done = os.pwritev(fd, spans, 0) if len(spans) <= IOV_MAX else 0
    while done < wanted:
        count = os.pwritev(fd, remaining(spans, done), done)
        if count == 0:
            raise OSError(errno.EIO, "the file system took no more bytes and gave no reason")
        done += count


def read_spans(fd: int, spans: Sequence[memoryview], wanted: int) -> bool:
    """Fills the spans, `wanted` bytes in all, from the start of the file; False at its end."""
    done = os.preadv(fd, spans, 0) if len(spans) <= IOV_MAX else 0
    while done < wanted:
        count = os.preadv(fd, remaining(spans, done), done)
        if count == 0:
            return False
        done += count
    return True


def remaining(spans: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the spans after their first `done` bytes: at most IOV_MAX, none empty."""
    left: list[memoryview] = []
    for span in spans:
        if done >= len(span):
            done -= len(span)
            continue
        left.append(span[done:] if done else span)
        done = 0
        if len(left) == IOV_MAX:
            break
    return left


def publish(temp: str, path: str, spans: PageSpans, length: int, *, sync: bool) -> int:
    """Writes a page of `length` bytes to `temp` and renames it to `path`; the length of the file
    that it replaced, 0 if there was none.

    A reader finds the old page or the new one. After an error the temporary file is gone and
    `path` is as it was. With `sync` the file's bytes are on the disk before it is published; the
    caller syncs the directory.
    """
    fd = os.open(temp, _CREATE, 0o666)
    try:
        try:
            write_spans(fd, spans, length)
            if sync:
                os.fsync(fd)
        finally:
            # A network file system may report a failed write only now.
            os.close(fd)
        return put_in_place(temp, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temp)
        raise


def read_header(fd: int) -> bytes:
    """The first bytes of a page file, fewer than a header's if it is shorter."""
    return os.pread(fd, HEADER_BYTES, 0)


def sync_directory(path: str) -> None:
    """Puts a directory's entries on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
