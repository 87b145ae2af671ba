"""Looks at how an environment's file is used, and makes a fragmented one compact."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

import lmdb

from ...errors import BackendError
from .datafile import Damaged, Extent, Meta, OtherFormat, read_metas, walk
from .judging import COPY, DATA, in_use, setup_lock, sweep
from .records import TREES, read_totals
from .sharing import borrow, is_open, release

_SPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class EnvironmentReport:
    """What an environment holds and how its file is used."""

    path: str
    file_bytes: int
    """Length of the data file."""
    pages: int
    """Pages of the cache, namespace records included."""
    stored_bytes: int
    """Their bytes, headers included."""
    used_bytes: int
    """Bytes of the file that hold pages and trees."""
    free_bytes: int
    """Bytes of the file that are free and will be used again before it grows."""
    longest_free_bytes: int
    """Longest run of free bytes. A page lies in one run, so free room in runs shorter than a page
    is of no use: then `compact` helps."""
    map_bytes: int
    """Size of the map as the last writer noted it."""
    readers: int
    """Read transactions under way, this report's own not counted."""

    @property
    def waste(self) -> float:
        """Share of the file that holds nothing, 0 to 1."""
        return self.free_bytes / self.file_bytes if self.file_bytes else 0.0


@dataclass(frozen=True)
class Compacted:
    """What `compact` did to the data file."""

    before_bytes: int
    after_bytes: int


def inspect(path: str | os.PathLike[str]) -> EnvironmentReport:
    """Reads and checks every tree of the environment in the directory, and reports.

    It may be in use. The report holds one read transaction, so that the file may grow meanwhile;
    it takes some seconds a million pages. Raises BackendError if it is damaged or no store.
    """
    real = os.path.realpath(path)
    environment = borrow(real)
    try:
        with environment.reading() as (txn, trees), open(f"{real}/{DATA}", "rb") as file:
            meta = _meta_of(txn, file.fileno(), real)
            stored_bytes = read_totals(txn, trees).stored_bytes
            readers = environment.reader_count() - 1
            try:
                extent: Extent = walk(file.fileno(), meta)
            except (Damaged, OtherFormat) as error:
                raise _failed(f"{real} is damaged: {error}", "inspect") from error
            file_bytes = os.fstat(file.fileno()).st_size
    finally:
        release(environment)
    size = extent.page_bytes
    return EnvironmentReport(
        path=real,
        file_bytes=file_bytes,
        pages=extent.entries["pages"],
        stored_bytes=stored_bytes,
        used_bytes=extent.used_pages * size,
        free_bytes=extent.free_pages * size,
        longest_free_bytes=extent.longest_free_run * size,
        map_bytes=meta.map_bytes,
        readers=max(readers, 0),
    )


def compact(path: str | os.PathLike[str]) -> Compacted:
    """Rewrites the data file without its free room, in place.

    Nobody may have the environment open: openers wait until it is done, up to a minute. Needs
    free disk space for a copy of what is used. Raises BackendError if that lacks, if it is in use
    or if it is damaged; the old file then stays as it is, as it does if the process is killed.
    """
    real = os.path.realpath(path)
    if not os.path.exists(f"{real}/{DATA}"):
        raise _failed(f"{real} holds no store", "compact")
    with setup_lock(real):
        if is_open(real) or in_use(real):
            raise _failed(f"{real} is in use; close every store on it first", "compact")
        sweep(real)
        with open(f"{real}/{DATA}", "rb") as file:
            before_bytes = os.fstat(file.fileno()).st_size
            try:
                extent = walk(file.fileno())
            except (Damaged, OtherFormat) as error:
                raise _failed(f"{real} is damaged: {error}", "compact") from error
        if not set(TREES) <= set(extent.entries):
            raise _failed(f"{real} is the environment of another program", "compact")
        wanted = extent.used_pages * extent.page_bytes + _SPARE_BYTES
        status = os.statvfs(real)
        if status.f_bavail * status.f_frsize < wanted:
            raise _failed(f"{real} needs {wanted} free bytes on its disk for a copy", "compact")
        copy = tempfile.mkdtemp(prefix=COPY, dir=real)
        try:
            with lmdb.open(real, readonly=True, create=False, max_dbs=len(TREES)) as handle:
                handle.copy(copy, compact=True)
            _replace(f"{copy}/{DATA}", real)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        return Compacted(before_bytes, os.stat(f"{real}/{DATA}").st_size)


def _meta_of(txn: Any, fd: int, path: str) -> Meta:
    """The meta of the state that the transaction sees. Two commits later it is overwritten."""
    for meta in read_metas(fd):
        if meta.transaction == txn.id():
            return meta
    raise _failed(f"{path} is written to too fast to be inspected; try again", "inspect")


def _replace(copy: str, directory: str) -> None:
    """Puts the copy in the place of the data file, whatever happens meanwhile."""
    with open(copy, "rb") as file:
        os.fsync(file.fileno())
    os.replace(copy, f"{directory}/{DATA}")
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _failed(message: str, operation: str) -> BackendError:
    return BackendError(message, backend="lmdb", operation=operation)
