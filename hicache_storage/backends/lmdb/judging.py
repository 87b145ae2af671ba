"""Judges the files of an environment before LMDB maps them, and keeps openers apart.

While the directory's `setup.lock` is held, of several processes that start at once one judges
the files and the others find them judged.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...errors import BackendError, BackendUnavailable, ConfigError
from .config import LmdbConfig
from .datafile import Damaged, OtherFormat, needed_bytes, read_meta, walk

logger = logging.getLogger("hicache_storage")

DATA, LOCK, SETUP = "data.mdb", "lock.mdb", "setup.lock"
COPY = "compact-"
"""Beginning of the name of the directory in which a compact copy is made."""

SUSPECT = "suspect"
"""Made when LMDB found damage at work; the next opening then checks the whole file."""
UNSYNCED = "unsynced"
"""Holds the boot id of the machine if commits since then may not have reached the disk."""
UNCLOSED = "unclosed"
"""Counts openings since the last orderly close. LMDB ends the process when it meets some kinds of
damage, so a process that keeps dying must not find the same file for ever."""
MOST_UNCLOSED = 3

SETUP_WAIT_S = 60.0
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@contextmanager
def setup_lock(path: str, *, read_only: bool = False) -> Iterator[None]:
    """Holds the directory's setup lock; without it if only reading and it can't be made."""
    try:
        fd = os.open(f"{path}/{SETUP}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        if not read_only:
            raise
        yield
        return
    try:
        until_s = time.monotonic() + SETUP_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise BackendUnavailable(
                        f"another process has been opening or compacting {path} for "
                        f"{SETUP_WAIT_S:g} s",
                        backend="lmdb",
                        operation="open",
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        # A child forked meanwhile shares the open file: closing alone would not release it.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def sweep(path: str) -> None:
    """Removes what a compaction that was killed left behind; the setup lock is held."""
    for name in os.listdir(path):
        if name.startswith(COPY):
            shutil.rmtree(f"{path}/{name}", ignore_errors=True)


def judge(path: str, config: LmdbConfig) -> None:
    """Looks whether the data file can be mapped, and puts it aside if it is proven damaged.

    Costs two small reads, unless there is reason for doubt. Nothing is judged while another
    process uses the file. The setup lock is held. Raises ConfigError for a file of another
    format, BackendError for a damaged one that can't be replaced now.
    """
    data = f"{path}/{DATA}"
    try:
        fd = os.open(data, (os.O_RDONLY if config.read_only else os.O_RDWR) | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if os.fstat(fd).st_size:
            _examine(fd, path, config.read_only)
    except OtherFormat as error:
        raise ConfigError(
            f"backend 'lmdb': {data}: {error}; this backend reads data format 1 (LMDB 0.9)"
        ) from error
    except Damaged as error:
        if config.read_only:
            message = f"{data} is damaged ({error}); opening it without read_only replaces it"
            raise BackendError(message, backend="lmdb", operation="open") from error
        put_aside(path, str(error))
    finally:
        os.close(fd)


def _examine(fd: int, path: str, read_only: bool) -> None:
    """Raises Damaged or OtherFormat. If the file is sound, what made it doubtful is settled."""
    if in_use(path):
        return
    meta = read_meta(fd)
    short = os.fstat(fd).st_size < needed_bytes(meta)
    unclosed = int(_read(f"{path}/{UNCLOSED}") or 0)
    doubtful = (
        os.path.exists(f"{path}/{SUSPECT}")
        or _read(f"{path}/{UNSYNCED}") not in ("", boot_id())
        or unclosed + 1 >= MOST_UNCLOSED
    )
    if short or doubtful:
        walk(fd, long_pages=doubtful)
    if read_only:
        return
    if short:
        # Its last pages are free and were never written; now it need not be walked again.
        with suppress(OSError):
            lengthen(fd, needed_bytes(meta) - 1, 1)
    if doubtful:
        for mark in (SUSPECT, UNSYNCED):
            with suppress(FileNotFoundError):
                os.unlink(f"{path}/{mark}")
    _write(f"{path}/{UNCLOSED}", "1" if doubtful else str(unclosed + 1))


def lengthen(fd: int, offset: int, length: int) -> None:
    """Gives the file room there, and makes it longer if need be, but never shorter.

    Unlike `os.posix_fallocate` it writes nothing where a file system has no such call: another
    process may be writing there. Raises OSError.
    """
    if _libc.fallocate(fd, 0, offset, length):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def note_closed(path: str) -> None:
    """An orderly close: whatever ends the process later, it wasn't this file."""
    with suppress(OSError):
        os.unlink(f"{path}/{UNCLOSED}")


def note_unsynced(path: str) -> None:
    """From now on commits may not reach the disk in order; survives a power cut itself."""
    _write(f"{path}/{UNSYNCED}", boot_id(), sync=True)


def note_suspect(path: str) -> None:
    """Has the next opening check the whole file."""
    with suppress(OSError):
        _write(f"{path}/{SUSPECT}", "")


def put_aside(path: str, reason: str) -> None:
    """Renames a damaged data file, so that a new one can be made; only the latest is kept."""
    kept = f"{DATA}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    os.rename(f"{path}/{DATA}", f"{path}/{kept}")
    with suppress(FileNotFoundError):
        os.unlink(f"{path}/{LOCK}")
    for mark in (SUSPECT, UNSYNCED, UNCLOSED):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}/{mark}")
    for name in os.listdir(path):
        if name.startswith(f"{DATA}.damaged-") and name != kept:
            os.unlink(f"{path}/{name}")
    logger.error(
        "lmdb store %s: the data file is damaged (%s). It is kept as %s and a new, empty one takes "
        "its place: all cached pages are lost. Delete the old one when it is not needed",
        path,
        reason,
        kept,
    )


def in_use(path: str) -> bool:
    """Whether another process has the environment open. This process must not: closing any
    descriptor of the lock file drops the locks that LMDB holds on it."""
    try:
        fd = os.open(f"{path}/{LOCK}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def boot_id() -> str:
    """Names this start of the machine; "unknown" where the kernel doesn't say."""
    return _read(_BOOT_ID) or "unknown"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _write(path: str, text: str, *, sync: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, text.encode())
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
