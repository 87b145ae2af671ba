"""One environment per process and directory, however many stores use it.

LMDB forbids opening a file twice in a process: its locks belong to the process, and closing one
handle drops those of the other. So stores on one directory, under whatever name it is reached,
share an `Environment` and count themselves in and out.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import lmdb

from ...errors import ConfigError
from .config import LmdbConfig
from .environment import Environment

_FORK_WAIT_S = 10.0


class _Shared:
    """The open environments of this process, by device and inode of their directory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: dict[tuple[int, int], Environment] = {}
        self._locked = False
        self._shut: list[Environment] = []

    def before_fork(self) -> None:
        """Waits until no thread is in a transaction, or opening or closing: a child must not
        inherit any of it half done."""
        self._locked = self.lock.acquire(timeout=_FORK_WAIT_S)
        self._shut = [one for one in list(self.open.values()) if one.before_fork()]

    def after_fork_in_parent(self) -> None:
        for environment in self._shut:
            environment.after_fork_in_parent()
        self._shut = []
        if self._locked:
            self._locked = False
            self.lock.release()

    def after_fork_in_child(self) -> None:
        shut, self._shut = self._shut, []
        self.lock, self._locked = threading.Lock(), False
        for environment in list(self.open.values()):
            with suppress(lmdb.Error):
                environment.after_fork_in_child(environment in shut or environment.idle)


_shared = _Shared()
os.register_at_fork(
    before=_shared.before_fork,
    after_in_parent=_shared.after_fork_in_parent,
    after_in_child=_shared.after_fork_in_child,
)


def acquire(path: str, config: LmdbConfig) -> Environment:
    """The environment in the directory `path`, opened if this process hasn't yet; give it back
    with `release`.

    Raises ConfigError if it is open with other options; see `LmdbConfig.conflicts`.
    """
    real = os.path.realpath(path)
    with _shared.lock:
        environment = _shared.open.get(_identity(real))
        if environment is None:
            environment = Environment(real, config)
            _shared.open[_identity(real)] = environment
        else:
            different = config.conflicts(environment.config)
            if different:
                raise ConfigError(
                    f"backend 'lmdb': {real} is open in this process with other options "
                    f"({'; '.join(different)}); a process has one environment a directory"
                )
        environment.users += 1
        return environment


def borrow(path: str) -> Environment:
    """As `acquire`, for reading only and with whatever options it is open already."""
    with _shared.lock:
        environment = _shared.open.get(_identity(path))
        if environment is not None:
            environment.users += 1
            return environment
    return acquire(path, LmdbConfig(path, read_only=True, allow_network=True))


def release(environment: Environment) -> None:
    """Gives an environment back; the last user's closes it."""
    with _shared.lock:
        environment.users -= 1
        if environment.users == 0:
            for key in [key for key, one in _shared.open.items() if one is environment]:
                del _shared.open[key]
            environment.close()


def is_open(path: str) -> bool:
    """Whether this process has the environment in the directory open."""
    with _shared.lock:
        return _identity(path) in _shared.open


def _identity(path: str) -> tuple[int, int]:
    """Device and inode of the directory: the same whatever name leads there. Zeros if there is
    none yet."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino
