"""FsspecBackend: one object or file a page, at `<path>/<namespace>/<2 hex digits>/<page key>`.

Only calls that take one exact name are used: `pipe_file`, `cat_file`, `info`, `rm_file`, `mv`. The
bulk calls of fsspec expand globs, raise for the first missing name, or return exceptions
among the data, each file system in its own way.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from hicache_storage import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    ConfigError,
    PageSpans,
    StoredPage,
    Usage,
    hookimpl,
)
from hicache_storage.failures import FailureLog
from hicache_storage.hookspecs import Scope
from hicache_storage.keys import split_page_key, split_stored_key
from hicache_storage.page import spans_bytes

from .config import FsspecConfig
from .filesystem import BUCKETS, FileSystem

LOOKED_UP_AT_ONCE = 128
TEMPORARY = ".writing-"
TEMPORARY_AGE_S = 3600.0


class FsspecBackend:
    """Pages in an fsspec file system."""

    Config = FsspecConfig
    scope: Scope = "shared"

    def __init__(self, config: FsspecConfig) -> None:
        if not config.path.strip("/"):
            raise ConfigError("fsspec: path must name a directory or bucket/prefix of its own")
        self.config = config
        if config.protocol == "memory":
            self.scope = "process"  # one dict a process, whoever opens it
        self.failures = FailureLog(f"fsspec {config.protocol}")
        self._files = FileSystem(config)
        self._root = config.path.rstrip("/")
        self._known: set[str] = set()
        self._lock = threading.Lock()

    @hookimpl
    def open(self) -> None:
        """Reaches the file system, and sweeps what dead writers left behind."""
        files = self._files.get()
        path = self.config.path
        if self.config.protocol not in BUCKETS:
            path = f"/{path.lstrip('/')}"  # or it would start from whatever directory is current
        self._root = files._strip_protocol(path).rstrip("/")
        try:
            files.exists(self._root)
        except Exception as error:
            raise self._translated(error, "open") from error
        if not self._files.atomic_put:
            self._sweep(files)

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        paths = [self._path(key) for key in keys]
        if self._files.atomic_put:
            written = self._files.each(
                "pipe_file",
                [(path, b"".join(page)) for path, page in zip(paths, pages, strict=True)],
            )
            return self._answers(written, "batch_set")
        return [self._publish(path, page) for path, page in zip(paths, pages, strict=True)]

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        found = self._files.each("cat_file", [(self._path(key),) for key in keys])
        present = self._answers(found, "batch_get")
        return [
            here and _fill(spans, data)
            for here, data, spans in zip(present, found, buffers, strict=True)
        ]

    @hookimpl
    def exists(self, keys: list[str]) -> int:
        for start in range(0, len(keys), LOOKED_UP_AT_ONCE):
            batch = keys[start : start + LOOKED_UP_AT_ONCE]
            found = self._answers(
                self._files.each("info", [(self._path(key),) for key in batch]), "exists"
            )
            if False in found:
                return start + found.index(False)
        return len(keys)

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        answers = self._files.each("rm_file", [(self._path(key),) for key in keys])
        missing = [isinstance(answer, FileNotFoundError) for answer in answers]
        gone = self._answers(answers, "delete")
        return [a or b for a, b in zip(gone, missing, strict=True)]

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        return self._scan(prefix)

    def _scan(self, prefix: str) -> Iterator[StoredPage]:
        """By namespace and fan-out directory, so that no listing holds the whole store."""
        for directory in self._directories(prefix):
            for entry in self._list(directory):
                key = self._key(entry["name"])
                if key is not None and key.startswith(prefix) and entry["type"] == "file":
                    yield StoredPage(key, int(entry["size"]), _modified_s(entry))

    @hookimpl
    def usage(self) -> Usage:
        pages = stored_bytes = 0
        for page in self._scan(""):
            pages += 1
            stored_bytes += page.stored_bytes
        return Usage(pages, stored_bytes)

    @hookimpl
    def clear(self) -> None:
        batch: list[str] = []
        for page in self._scan(""):
            batch.append(page.key)
            if len(batch) == LOOKED_UP_AT_ONCE:
                self.delete(batch)
                batch = []
        if batch:
            self.delete(batch)

    @hookimpl
    def close(self) -> None:
        self._files.drop()

    def _path(self, key: str) -> str:
        digest, page_key = split_stored_key(key)
        fan_out = split_page_key(page_key)[1][:2]
        return f"{self._root}/{digest}/{fan_out}/{page_key.replace(':', '-')}"

    def _key(self, path: str) -> str | None:
        """The stored key of a path, or None for what isn't a page."""
        digest, _, name = ("/" + path).rsplit("/", 3)[1:]
        key = f"{digest}/{name.replace('-', ':')}"
        try:
            return key if path.endswith(self._path(key)[len(self._root) :]) else None
        except ValueError:
            return None

    def _publish(self, path: str, page: PageSpans) -> bool:
        """Writes beside the name, then moves: for file systems that write in place."""
        files = self._files.get()
        directory = path.rpartition("/")[0]
        temporary = f"{directory}/{TEMPORARY}{uuid.uuid4().hex}"
        try:
            for attempt in (1, 2):
                try:
                    if directory not in self._known or attempt == 2:
                        files.makedirs(directory, exist_ok=True)
                        self._known.add(directory)
                    with files.open(temporary, "wb") as out:
                        for span in page:
                            out.write(span)
                    break
                except FileNotFoundError:
                    if attempt == 2:  # somebody keeps removing the directory
                        raise
            _move(files, temporary, path)
        except Exception as error:
            _caught_remove(files, temporary)
            return self._answers([error], "batch_set")[0]
        return True

    def _sweep(self, files: Any) -> None:
        """Removes temporary files that are so old that their writer is gone."""
        for directory in self._directories(""):
            for entry in self._list(directory):
                name = entry["name"].rpartition("/")[2]
                modified_s = _modified_s(entry)
                old = modified_s is not None and time.time() - modified_s > TEMPORARY_AGE_S
                if name.startswith(TEMPORARY) and old:
                    _caught_remove(files, entry["name"])

    def _directories(self, prefix: str) -> Iterator[str]:
        """Fan-out directories that may hold keys with this prefix."""
        wanted = prefix.partition("/")[0]
        for namespace in self._list(self._root):
            name = namespace["name"].rstrip("/").rpartition("/")[2]
            if namespace["type"] == "directory" and name.startswith(wanted):
                for fan_out in self._list(namespace["name"].rstrip("/")):
                    if fan_out["type"] == "directory":
                        yield fan_out["name"].rstrip("/")

    def _list(self, directory: str) -> list[dict[str, Any]]:
        try:
            return list(self._files.get().ls(directory, detail=True))
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._translated(error, "scan") from error

    def _answers(self, results: Sequence[Any], operation: str) -> list[bool]:
        """True for each that isn't an exception. A missing file is a miss, a fault of one page is
        logged; raises if none of them could be served for the same lasting reason."""
        faults = [
            r for r in results if isinstance(r, Exception) and not isinstance(r, FileNotFoundError)
        ]
        for error in faults[:1]:
            if len(faults) == len(results) and not isinstance(error, (PermissionError, ValueError)):
                raise self._translated(error, operation) from error
        for error in faults:
            self.failures.note(operation, error)
        return [not isinstance(result, Exception) for result in results]

    def _translated(self, error: Exception, operation: str) -> BackendError:
        text = f"{self.config.protocol}: {type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            return BackendTimeout(text, backend="fsspec", operation=operation)
        if isinstance(error, OSError):
            return BackendUnavailable(text, backend="fsspec", operation=operation)
        return BackendError(text, backend="fsspec", operation=operation)


def _fill(spans: PageSpans, data: bytes) -> bool:
    if len(data) != spans_bytes(spans):
        return False
    whole = memoryview(data)
    start = 0
    for span in spans:
        span[:] = whole[start : start + len(span)]
        start += len(span)
    return True


def _move(files: Any, source: str, destination: str) -> None:
    """A rename that replaces; os.replace where the files are local, since `mv` may copy."""
    if "file" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)):
        os.replace(source, destination)
    else:
        files.mv(source, destination)


def _caught_remove(files: Any, path: str) -> None:
    try:
        files.rm_file(path)
    except Exception:
        return  # it was never made, or is swept later


def _modified_s(entry: dict[str, Any]) -> float | None:
    """When an entry was last modified: file systems name and type it differently."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = entry.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None
