"""Root: the directory of a store, made or recognised when it is opened.

A root holds `.hicache-storage/format`. Pages are written, evicted and cleared only where that
file is, so a path given by mistake loses nothing, and neither does the bare mount point of a
disk that isn't mounted.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass

from ...errors import BackendUnavailable, ConfigError
from ..mounts import file_system
from .faults import FULL, NOT_WRITABLE
from .names import CONTROL, LONGEST_USUAL_NAME

FORMAT = b"hicache-storage file store, format 1\n"
_OWN_NAMES = {CONTROL, "lost+found"}
_LONGEST_PATH = 4096 - 256


@dataclass(frozen=True)
class Root:
    """An open root."""

    path: str
    """Absolute, free of links."""
    file_system: str
    """Type of its file system; "" if unknown."""

    @property
    def control(self) -> str:
        """The directory that the backend keeps for itself."""
        return f"{self.path}/{CONTROL}"

    @property
    def writers(self) -> str:
        return f"{self.control}/writers"


def open_root(path: str, *, read_only: bool) -> Root:
    """Opens the root, and makes it unless it is there or opened only for reading.

    Any number of processes may do it at once. Raises ConfigError for a directory that isn't a
    store or can't be one, BackendUnavailable if it can't be reached.
    """
    path = os.path.realpath(path)
    _check_length(path)
    if not read_only:
        try:
            _make(path)
        except OSError as error:
            if error.errno not in NOT_WRITABLE | FULL:
                raise _unusable(path, error) from error
    _recognise(path)
    _check_names(path)
    return Root(path, file_system(path))


def require(root: str) -> None:
    """Raises BackendUnavailable unless the root is there, readable and still a store."""
    try:
        os.stat(f"{root}/{CONTROL}/format")
    except OSError as error:
        raise BackendUnavailable(
            f"the root {root} is gone or can't be read: {error}", backend="file", operation="access"
        ) from error


def _make(path: str) -> None:
    os.makedirs(path, exist_ok=True)
    marker = f"{path}/{CONTROL}/format"
    if os.path.lexists(marker):
        _make_missing(f"{path}/{CONTROL}/writers")
        return
    foreign = sorted(set(os.listdir(path)) - _OWN_NAMES)
    if foreign and not os.path.lexists(marker):
        raise ConfigError(
            f"{path} is not empty ({', '.join(foreign[:3])}{', ...' if foreign[3:] else ''}) and "
            "is not a store of this package; give a directory of its own, or an empty one"
        )
    _make_missing(f"{path}/{CONTROL}")
    _make_missing(f"{path}/{CONTROL}/writers")
    fresh = f"{marker}.{os.getpid()}.{os.urandom(4).hex()}"
    with open(fresh, "xb") as file:
        file.write(FORMAT)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, marker)


def _make_missing(path: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(path)


def _recognise(path: str) -> None:
    try:
        with open(f"{path}/{CONTROL}/format", "rb") as file:
            found = file.read(256)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is not a store: it has no {CONTROL}/format. Check the path; a new store is "
            "made only where the directory can be written and read_only is not set"
        ) from error
    except OSError as error:
        raise _unusable(path, error) from error
    if found != FORMAT:
        raise ConfigError(
            f"{path} is a store of another format ({found[:60]!r}; this release reads "
            f"{FORMAT!r}); give another directory"
        )


def _check_length(path: str) -> None:
    if (length := len(os.fsencode(path))) > _LONGEST_PATH:
        raise ConfigError(
            f"the path {path[:60]}... has {length} bytes; with the names of pages it must stay "
            f"below 4096. Give one of at most {_LONGEST_PATH}"
        )


def _check_names(path: str) -> None:
    try:
        name_max = os.pathconf(path, "PC_NAME_MAX")
    except OSError:
        name_max = 255
    if name_max < LONGEST_USUAL_NAME:
        raise ConfigError(
            f"the file system of {path} takes names of at most {name_max} bytes; pages need "
            f"{LONGEST_USUAL_NAME}. Give a directory on another file system"
        )


def _unusable(path: str, error: OSError) -> Exception:
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EINVAL):
        return ConfigError(f"{path:.200} can't be a store: {error.strerror}")
    return BackendUnavailable(f"{path}: {error}", backend="file", operation="open")
