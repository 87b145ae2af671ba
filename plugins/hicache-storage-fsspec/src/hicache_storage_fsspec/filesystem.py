"""One file system instance a backend and process, and many operations on it at once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hicache_storage import BackendUnavailable, ConfigError

from .config import FsspecConfig, storage_options

BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos", "r2"}
"""Protocols whose paths begin with the name of a bucket."""
ATOMIC_PUT = BUCKETS | {"memory"}
"""Protocols where a write to a name appears whole or not at all."""


class FileSystem:
    """An fsspec file system of our own: no shared instance, no cached listings.

    fsspec caches instances by their options and the thread's id, and listings by directory; both
    would be shared with, or hidden from, others. A forked child makes an instance of its own.
    """

    def __init__(self, config: FsspecConfig) -> None:
        self.config = config
        self.atomic_put = config.publish == "put" or (
            config.publish == "auto" and config.protocol in ATOMIC_PUT
        )
        self._options = storage_options(config)
        self._lock = threading.Lock()
        self._made: Any = None
        self._pid = 0

    def get(self) -> Any:
        """The instance of this process."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._made, self._pid = self._make(), os.getpid()
        return self._made

    def drop(self) -> None:
        """Forgets the instance."""
        with self._lock:
            self._made, self._pid = None, 0

    def each(self, verb: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls `verb` once for each tuple; results, or the exceptions, in order.

        All at once, `concurrency` at a time, where the file system is asynchronous.
        """
        from fsspec.asyn import AsyncFileSystem, sync

        made = self.get()
        if isinstance(made, AsyncFileSystem) and made.async_impl:
            call = getattr(made, f"_{verb}")
            return list(sync(made.loop, _gather, call, arguments, self.config.concurrency))
        call = getattr(made, verb)
        return [_caught(call, each) for each in arguments]

    def _make(self) -> Any:
        import fsspec
        from fsspec.asyn import AsyncFileSystem

        protocol = self.config.protocol
        try:
            cls = fsspec.get_filesystem_class(protocol)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"fsspec: file system {protocol!r} can't be used: {error}; install the package "
                "that provides it (s3fs, gcsfs, adlfs, ...)"
            ) from error
        options = {"use_listings_cache": False, "skip_instance_cache": True, **self._options}
        if issubclass(cls, AsyncFileSystem):
            options["asynchronous"] = False
        try:
            return cls(**options)
        except Exception as error:
            raise BackendUnavailable(
                f"{protocol}: {type(error).__name__}: {error}", backend="fsspec", operation="open"
            ) from error


async def _gather(
    call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], concurrency: int
) -> list[Any]:
    turns = asyncio.Semaphore(concurrency)

    async def one(each: tuple[Any, ...]) -> Any:
        async with turns:
            return await call(*each)

    return await asyncio.gather(*map(one, arguments), return_exceptions=True)


def _caught(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        return error
