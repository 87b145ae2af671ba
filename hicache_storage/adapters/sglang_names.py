"""Names under which SGLang knows this package's backends."""

from __future__ import annotations

import re

MODULE = "hicache_storage.adapters.sglang"
"""The module that SGLang takes classes from."""
ANY_NAME = "hicache_storage"
ANY_BACKEND = "HiCacheStore"
"""Name and class that take any backend, by its 'url'."""
_TAKEN = {"HiCacheFile": "HiCacheFiles"}
"""Class names that SGLang has, and what ours are called."""


def class_name(backend: str) -> str:
    """The name of a backend's class, which SGLang shows to users: "HiCacheS3" for "s3"."""
    name = "HiCache" + "".join(part.capitalize() for part in re.split(r"[^a-z0-9]+", backend))
    return _TAKEN.get(name, name)
