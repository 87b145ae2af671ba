"""Writers: who writes to a root, so that the temporary files of the dead can be told apart.

Each process that writes has a file `<root>/.hicache-storage/writers/<id>`, locked for as long as
the process lives; its temporary files carry the id. The kernel drops the lock when a process
dies, however it dies and in whatever container.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import threading
import time
from contextlib import suppress

from .walk import TempFile, temps

_WRITER_NAME = re.compile(r"[0-9a-f]{16}")
UNKNOWN_AGE_S = 24 * 3600.0
"""Age from which a temporary file goes if nobody can tell whether its writer lives."""


class Writer:
    """This process as a writer."""

    def __init__(self, directory: str) -> None:
        """Raises OSError if the directory can't be written to."""
        self.id = secrets.token_hex(8)
        self._path = f"{directory}/{self.id}"
        self._fd = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        with suppress(OSError):  # without locks its liveness is unknown, and age decides
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)
        os.close(self._fd)

    def abandon(self) -> None:
        """Drops the descriptor that a forked child inherited; the parent stays registered."""
        os.close(self._fd)


def gone_writers(directory: str, age_s: float) -> tuple[set[str], set[str]]:
    """Ids of writers that died and left their file behind at least `age_s` ago; and of those that
    began more than a day ago and may live or not, as locks don't tell."""
    dead, doubtful = set(), set()
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not _WRITER_NAME.fullmatch(entry.name):
                continue
            with suppress(OSError):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                alive = is_alive(directory, entry.name)
                if alive is False and age >= age_s:
                    dead.add(entry.name)
                elif alive is None and age >= UNKNOWN_AGE_S:
                    doubtful.add(entry.name)
    return dead, doubtful


def is_alive(directory: str, writer: str) -> bool | None:
    """Whether the writer lives; None if locks don't tell."""
    try:
        fd = os.open(f"{directory}/{writer}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)


def remove_if_orphan(temp: TempFile, directory: str, age_s: float) -> bool:
    """Removes a temporary file that is old enough and whose writer is dead; True if it did."""
    try:
        age = time.time() - os.lstat(temp.path).st_mtime
        if age < age_s:
            return False
        alive = is_alive(directory, temp.writer)
        if alive or (alive is None and age < UNKNOWN_AGE_S):
            return False
        os.unlink(temp.path)
    except OSError:
        return False
    return True


def sweep(root: str, directory: str, age_s: float, stop: threading.Event) -> None:
    """Removes the temporary files of dead writers, then their own files.

    Walks the whole root if, and only if, there may be some; ends early once `stop` is set.
    """
    dead, doubtful = gone_writers(directory, age_s)
    if not dead and not doubtful:
        return
    kept = set()
    for temp in temps(root):
        if stop.is_set():
            return
        if not remove_if_orphan(temp, directory, age_s):
            kept.add(temp.writer)
    for writer in dead - kept:
        with suppress(OSError):
            os.unlink(f"{directory}/{writer}")
