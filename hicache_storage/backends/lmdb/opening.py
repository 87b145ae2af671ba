"""Opens an environment, once it is known to be safe: local, ours, whole.

Everything here runs while the directory's `setup.lock` is held, so that of several processes
that start at once one judges the files and the others find them judged.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lmdb

from ...errors import BackendError, BackendUnavailable, ConfigError
from .config import LmdbConfig
from .datafile import Damaged, OtherFormat, needed_bytes, read_meta, walk
from .mounts import file_system, trust
from .records import FORMAT, FORMAT_KEY, TREES, Trees

logger = logging.getLogger("hicache_storage")

DATA, LOCK, SETUP = "data.mdb", "lock.mdb", "setup.lock"
SUSPECT = "suspect"
"""Made when LMDB found damage at work; the next opening then checks the whole file."""
UNSYNCED = "unsynced"
"""Holds the boot id of the machine if commits since then may not have reached the disk."""
COPY = "compact-"
"""Beginning of the name of the directory in which a compact copy is made."""
SETUP_WAIT_S = 60.0
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def open_environment(path: str, config: LmdbConfig, map_bytes: int) -> tuple[Any, Trees]:
    """Opens the environment in the directory; the handle and its trees.

    Nobody in this process may have it open. Raises ConfigError if it isn't this backend's or
    must not be used here, BackendError if it can't be opened.
    """
    check_place(path, config)
    with setup_lock(path, read_only=config.read_only):
        if not config.read_only:
            sweep(path)
        judge(path, config)
        if config.durability == "async" and not config.read_only:
            _write(f"{path}/{UNSYNCED}", boot_id())
        handle = _open(path, config, map_bytes)
        try:
            if not config.read_only:
                # Slots of processes that were killed; each would keep old pages from being reused.
                handle.reader_check()
            with suppress(lmdb.MapResizedError):
                return handle, _trees(handle, config)
            # Another process wrote beyond our map since the line before.
            handle.set_mapsize(0)
            return handle, _trees(handle, config)
        except BaseException:
            handle.close()
            raise


def check_place(path: str, config: LmdbConfig) -> None:
    """Makes the directory if needed, and refuses one that LMDB can't be trusted to."""
    if not config.read_only:
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(f"{path}/{DATA}"):
        raise BackendError(
            f"{path} holds no store to read; open it once without read_only to make one",
            backend="lmdb",
            operation="open",
        )
    kind = file_system(path)
    verdict = trust(kind)
    if verdict == "network" and not config.allow_network:
        raise ConfigError(
            f"backend 'lmdb': {path} is on a network file system ({kind}), where LMDB's locks and "
            "its map can't be relied on; use a local disk or another backend, or set "
            "allow_network=true if this host alone uses it"
        )
    if verdict != "local":
        logger.warning(
            "lmdb store %s is on a file system of type %s, which may not keep the order of writes "
            "or support a shared map; a local disk is safe",
            path,
            kind,
        )


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

    Costs two reads of a sound file. Nothing is judged while another process uses it.
    """
    data = f"{path}/{DATA}"
    try:
        fd = os.open(data, os.O_RDWR if not config.read_only else os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        if os.fstat(fd).st_size == 0:
            return
        try:
            short = os.fstat(fd).st_size < needed_bytes(read_meta(fd))
            suspect = os.path.exists(f"{path}/{SUSPECT}")
            unproven = _read(f"{path}/{UNSYNCED}") not in ("", boot_id())
            if not (short or suspect or unproven) or in_use(path):
                return
            walk(fd, long_pages=suspect or unproven)
            if short and not config.read_only:
                # Sound, but with free pages beyond its end. Reading there would be a bus error.
                os.posix_fallocate(fd, needed_bytes(read_meta(fd)) - 1, 1)
        except OtherFormat as error:
            raise ConfigError(
                f"backend 'lmdb': {data}: {error}; this backend reads data format 1 (LMDB 0.9)"
            ) from error
        except Damaged as error:
            if in_use(path):
                raise BackendUnavailable(
                    f"{data} is damaged ({error}), and another process has it open; close the "
                    "others, then the next opening replaces it",
                    backend="lmdb",
                    operation="open",
                ) from error
            if config.read_only:
                raise BackendError(
                    f"{data} is damaged ({error}); opening it to write replaces it",
                    backend="lmdb",
                    operation="open",
                ) from error
            put_aside(path, str(error))
    finally:
        os.close(fd)
    if not config.read_only:
        for mark in (SUSPECT, UNSYNCED):
            with suppress(FileNotFoundError):
                os.unlink(f"{path}/{mark}")


def put_aside(path: str, reason: str) -> None:
    """Renames a damaged data file, so that a new one can be made; only the latest is kept."""
    kept = f"{DATA}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    os.rename(f"{path}/{DATA}", f"{path}/{kept}")
    with suppress(FileNotFoundError):
        os.unlink(f"{path}/{LOCK}")
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


def _trees(handle: Any, config: LmdbConfig) -> Trees:
    """The named trees, made if need be. Raises ConfigError if they are somebody else's."""
    if config.read_only:
        with handle.begin() as txn:
            if not _names(txn, handle):
                raise BackendError(
                    f"{handle.path()} holds no store to read yet", backend="lmdb", operation="open"
                )
        # Without a transaction given: a handle lasts only if the one it was made in commits.
        trees = Trees(*(handle.open_db(name.encode(), create=False) for name in TREES))
        with handle.begin() as txn:
            _check_format(txn.get(FORMAT_KEY, db=trees.totals), handle)
        return trees
    with handle.begin(write=True) as txn:
        new = not _names(txn, handle)
        trees = Trees(*(handle.open_db(name.encode(), txn=txn) for name in TREES))
        if new:
            txn.put(FORMAT_KEY, FORMAT, db=trees.totals)
        _check_format(txn.get(FORMAT_KEY, db=trees.totals), handle)
    return trees


def _names(txn: Any, handle: Any) -> set[str]:
    """The names in the environment: those of TREES, or none yet."""
    with txn.cursor() as cursor:
        found = {name.decode("latin-1") for name in cursor.iternext(values=False)}
    if found and found != set(TREES):
        raise ConfigError(
            f"backend 'lmdb': {handle.path()} holds an LMDB environment of another program (it "
            f"has {', '.join(sorted(found)[:4])!r}); give this store a directory of its own"
        )
    return found


def _check_format(form: bytes | None, handle: Any) -> None:
    if form != FORMAT:
        raise ConfigError(
            f"backend 'lmdb': {handle.path()} has the layout {form!r}, this release reads "
            f"{FORMAT!r}; give this store a directory of its own"
        )


def boot_id() -> str:
    """Names this start of the machine; "unknown" where the kernel doesn't say."""
    return _read(_BOOT_ID) or "unknown"


def suspect(path: str) -> None:
    """Has the next opening check the whole file."""
    with suppress(OSError):
        _write(f"{path}/{SUSPECT}", "")


def _open(path: str, config: LmdbConfig, map_bytes: int) -> Any:
    options: dict[str, Any] = dict(config.flags)
    if int(lmdb.__version__.partition(".")[0]) >= 3:
        options["lib_version"] = 0
    return lmdb.open(
        path,
        map_size=map_bytes,
        readonly=config.read_only,
        create=not config.read_only,
        readahead=config.readahead,
        max_readers=config.max_readers,
        max_dbs=len(TREES),
        max_spare_txns=0,
        lock=_needs_lock(path) if config.read_only else True,
        mode=0o755,
        **options,
    )


def _needs_lock(path: str) -> bool:
    """Whether a reader takes part in locking. Raises ConfigError if it must and can't."""
    if os.path.exists(f"{path}/{LOCK}"):
        if os.access(f"{path}/{LOCK}", os.R_OK | os.W_OK):
            return True
        if not os.statvfs(path).f_flag & os.ST_RDONLY:
            raise ConfigError(
                f"backend 'lmdb': {path}/{LOCK} can't be written to. Readers enter themselves "
                "there, so that writers don't reuse what they read; allow it (chmod), or read a "
                "copy of the directory"
            )
        logger.warning(
            "lmdb store %s is mounted read-only and is read without locks: nobody may write to "
            "it through another mount meanwhile",
            path,
        )
        return False
    # Without a lock file no writer is at work; one is made where that is possible.
    return os.access(path, os.W_OK)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
