"""Which file system a directory is on, and whether other hosts share it."""

from __future__ import annotations

import os
import re

MOUNTINFO = "/proc/self/mountinfo"
_CLUSTER = {"ceph", "lustre", "beegfs", "gpfs", "afs", "glusterfs", "ocfs2", "gfs2"}
NETWORK_TYPES = _CLUSTER | {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs"}
_ESCAPE = re.compile(r"\\([0-7]{3})")


def file_system_type(path: str, mountinfo: str = MOUNTINFO) -> str:
    """The type of the file system that the directory is on, as the kernel names it; "" if the
    system doesn't tell."""
    best, found = "", ""
    path = os.path.realpath(path)
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.readlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if "-" not in fields or len(fields) < 7:
            continue
        mount_point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        # A later mount on the same point covers the earlier one.
        if inside and len(mount_point) >= len(best):
            best, found = mount_point, fields[fields.index("-") + 1]
    return found


def is_network_type(kind: str) -> bool:
    """Whether file systems of this type are, or may be, shared with other hosts.

    FUSE file systems count too: what they keep is theirs to know.
    """
    return kind in NETWORK_TYPES or kind == "fuse" or kind.startswith("fuse.")
