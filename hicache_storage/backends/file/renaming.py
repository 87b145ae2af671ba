"""Renaming into place, so that exactly one process knows what it replaced.

Plain rename tells nobody whether, and with what, the name was taken. renameat2 can refuse a name
that is taken, and can exchange two names, after which what was replaced lies under ours. That is
what keeps the ledger true when writers and the evictor meet on one page. Exchanging also spares
the flush that some file systems do when a file is renamed over another.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat

_NO_REPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_TRIES = 4

_C = ctypes.CDLL(None, use_errno=True)


def put_in_place(temp: str, path: str) -> int:
    """Renames `temp` to `path`; length of the file that it replaced, 0 if there was none.

    A reader finds the old file or the new one. Where the file system can't tell, 0.
    """
    for _ in range(_TRIES):
        try:
            _rename(temp, path, _NO_REPLACE)
            return 0
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                break
            if error.errno != errno.EEXIST:
                raise
        try:
            _rename(temp, path, _EXCHANGE)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                break
            if error.errno != errno.ENOENT:  # evicted just now
                raise
        else:
            return _remove_replaced(temp, path)
    os.rename(temp, path)
    return 0


def _remove_replaced(temp: str, path: str) -> int:
    """Removes what stood at `path` and is at `temp` now."""
    status = os.lstat(temp)
    if stat.S_ISDIR(status.st_mode):
        _rename(temp, path, _EXCHANGE)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    os.unlink(temp)
    return status.st_size


def _rename(old: str, new: str, flags: int) -> None:
    renameat2 = getattr(_C, "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    arguments = (_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags)
    if renameat2(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), old, None, new)
