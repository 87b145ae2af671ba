"""What the errors of a file system mean here."""

from __future__ import annotations

import errno

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""No room: evict, try once more, else the page isn't stored."""

VANISHED = frozenset({errno.ENOENT, errno.ESTALE})
"""The file or its directory went away under us, or another host replaced it: look again."""


def kind_of(operation: str, error: OSError) -> str:
    """How a failure log counts the error: "read, EIO"."""
    return f"{operation}, {errno.errorcode.get(error.errno or 0, 'error')}"
