"""Stores through s3fs on a server of the tests."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from s3_servers import ACCESS_KEY, SECRET_KEY, Server

from hicache_storage import open_store


def s3fs_mapping(server: Server) -> dict[str, Any]:
    """A new, empty store in the tests' bucket; skips where there is no s3fs."""
    pytest.importorskip("s3fs", reason="needs s3fs: pip install -e '.[test,s3]'")
    open_store(server.store_url()).close()  # makes the bucket
    return {
        "backend": "fsspec",
        "protocol": "s3",
        "path": f"pages/fsspec-{uuid.uuid4().hex}",
        "storage_options": {
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "endpoint_url": server.url,
            "client_kwargs": {"region_name": "us-east-1"},
        },
    }
