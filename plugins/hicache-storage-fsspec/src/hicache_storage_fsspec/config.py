"""Options of fsspec://."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hicache_storage import ConfigError
from hicache_storage.config import option


@dataclass(frozen=True)
class FsspecConfig:
    """Options of fsspec://PROTOCOL/PATH."""

    protocol: str = option(
        url="host", doc='fsspec\'s name of the file system: "s3", "file", "gcs".'
    )
    path: str = option(url="path", doc="Directory or bucket/prefix that holds the pages.")
    storage_options: Any = option(
        None, secret=True, doc="What fsspec hands to the file system: a mapping, or JSON in a URL."
    )
    concurrency: int = option(32, doc="Requests at once, where the file system is asynchronous.")
    publish: str = option(
        "auto",
        choices=("auto", "put", "rename"),
        doc="put: a write to a name is atomic in this store. rename: write beside it, then move. "
        "auto: put for object stores and memory, rename for everything else.",
    )


def storage_options(config: FsspecConfig) -> dict[str, Any]:
    """A copy of the storage options; raises ConfigError unless they are a mapping."""
    given = config.storage_options
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"fsspec: storage_options are not JSON: {error}") from error
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"fsspec: storage_options must be a mapping, got {type(given).__name__}")
    return dict(given)
