"""What the errors of a file system mean here."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import BackendUnavailable

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""No room: evict, try once more, else the page isn't stored."""

NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Not ours to write: the page, or at opening the store, is only read."""

VANISHED = frozenset({errno.ENOENT, errno.ESTALE})
"""The file or its directory went away under us, or another host replaced it: look again."""


def kind_of(operation: str, error: OSError) -> str:
    """How a failure log counts the error: "read, EIO"."""
    return f"{operation}, {errno.errorcode.get(error.errno or 0, 'error')}"


@contextmanager
def translated(operation: str) -> Iterator[None]:
    """Makes an error of the file system, in something that concerns the whole store, one of this
    package."""
    try:
        yield
    except OSError as error:
        raise BackendUnavailable(str(error), backend="file", operation=operation) from error
