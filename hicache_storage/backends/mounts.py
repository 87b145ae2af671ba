"""Which file system a directory lies on, and whether what one host knows of it is all there is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Trust = Literal["local", "doubtful", "network"]

# fmt: off
_NETWORK = frozenset((
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "ceph", "coda",
    "glusterfs", "lustre", "gpfs", "beegfs", "beegfs_nodev", "pvfs2", "orangefs", "davfs",
    "moosefs", "juicefs", "wekafs", "panfs", "gfs", "gfs2", "ocfs2",
))
_NETWORK_FUSE = (
    "s3", "gcs", "blob", "goofys", "mountpoint", "rclone", "ssh", "curl", "dav", "juicefs",
    "gluster", "ceph", "nfs", "smb", "hdfs", "alluxio", "seaweedfs", "weed", "geese", "moose",
    "mfs", "lizard", "object", "oss", "cos", "obs", "azure", "google",
)
# fmt: on
_DOUBTFUL = frozenset({"9p", "virtiofs", "fuse", "fuseblk", "vboxsf", "prl_fs"})
MOUNTS = Path("/proc/self/mountinfo")


def file_system(directory: str, mounts: str | None = None) -> str:
    """Type of the file system that holds the directory, as "ext4"; "" if it can't be told.

    `mounts` is the text of /proc/self/mountinfo, which is read if it is None.
    """
    if mounts is None:
        try:
            mounts = MOUNTS.read_text(errors="surrogateescape")
        except OSError:
            return ""
    path = os.path.realpath(directory)
    best, kind = -1, ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) < 5 or not after:
            continue
        point = fields[4].encode("ascii", "backslashreplace").decode("unicode_escape")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one is on top.
        if inside and len(point) >= best:
            best, kind = len(point), after[0]
    return kind


def trust(kind: str) -> Trust:
    """Whether a file system of this type keeps what stores on one host build on: locks that all
    users see, a map that agrees with writes, and writes in order."""
    name, _, subtype = kind.lower().partition(".")
    if name in _NETWORK:
        return "network"
    if subtype:
        remote = any(part in subtype for part in _NETWORK_FUSE)
        return "network" if remote else "doubtful"
    return "doubtful" if name in _DOUBTFUL else "local"
