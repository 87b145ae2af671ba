"""Opens an environment: where LMDB can be trusted, once the file is judged, if it is ours."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from typing import Any

import lmdb

from ...errors import BackendError, ConfigError
from ..mounts import file_system, trust
from .config import LmdbConfig
from .judging import DATA, LOCK, judge, note_unsynced, setup_lock, sweep
from .records import FORMAT, FORMAT_KEY, TREES, Trees

logger = logging.getLogger("hicache_storage")
_TRIES = 20
"""Of opening an environment whose map others enlarge meanwhile."""


def open_environment(path: str, config: LmdbConfig, map_bytes: int) -> tuple[Any, Trees]:
    """Opens the environment in the directory; the handle and its trees.

    Nobody in this process may have it open. Raises ConfigError if it isn't this backend's or
    must not be used here, BackendError if it can't be opened.
    """
    check_release(lmdb.__version__)
    check_place(path, config)
    with setup_lock(path, read_only=config.read_only):
        if not config.read_only:
            sweep(path)
        judge(path, config)
        if config.durability == "async" and not config.read_only:
            note_unsynced(path)
        for _ in range(_TRIES):
            with suppress(lmdb.MapResizedError):
                return _open_with_trees(path, config, map_bytes)
        return _open_with_trees(path, config, map_bytes)


def check_release(version: str) -> None:
    """Refuses releases of the client that fail in ways that can't be worked around."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < (1, 7, 3):
        problem = "keeps a read transaction that a fork would break"
    elif numbers[:2] == (2, 0):
        problem = "stops all threads while another process commits"
    elif numbers[:2] == (2, 2):
        problem = "loses its trees when the map grows"
    else:
        return
    raise ConfigError(
        f"backend 'lmdb': lmdb {version} {problem}; use 1.7.3 or newer, but neither 2.0 nor 2.2: "
        "pip install 'hicache-storage[lmdb]'"
    )


def check_place(path: str, config: LmdbConfig) -> None:
    """Makes the directory if needed, and refuses one that LMDB can't be trusted to."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"backend 'lmdb': {path} is not a directory")
    if not config.read_only:
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(f"{path}/{DATA}"):
        raise BackendError(
            f"{path} holds no store to read: check the path, or open it once without read_only to "
            "make one",
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


def _open_with_trees(path: str, config: LmdbConfig, map_bytes: int) -> tuple[Any, Trees]:
    """Raises MapResizedError if another process writes beyond the map while it is made."""
    handle = _open(path, config, map_bytes)
    try:
        if not config.read_only:
            # Slots of processes that were killed; each would keep old pages from being reused.
            handle.reader_check()
        return handle, _trees(handle, config)
    except BaseException:
        handle.close()
        raise


def _open(path: str, config: LmdbConfig, map_bytes: int) -> Any:
    options: dict[str, Any] = dict(config.flags)
    if int(lmdb.__version__.partition(".")[0]) >= 3:
        options["lib_version"] = 0
    return lmdb.open(
        path,
        map_size=map_bytes,
        readonly=config.read_only,
        create=not config.read_only,
        readahead=False,  # `bodies` says why
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
