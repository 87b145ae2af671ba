"""Fixtures: stores on the misbehaving server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from backends.s3.misbehaving_server import MisbehavingServer
from backends.s3.rig import Opened, url_of
from s3_servers import moto, seaweedfs

from hicache_storage import open_store

__all__ = ["moto", "seaweedfs"]


@pytest.fixture
def server() -> Iterator[MisbehavingServer]:
    with MisbehavingServer() as server:
        yield server


@pytest.fixture
def opened() -> Iterator[Callable[..., Opened]]:
    """`opened(server, **options)`: an open store, closed after the test."""
    stores = []

    def make(server: MisbehavingServer, **options: Any) -> Opened:
        store = open_store(url_of(server, **options))
        stores.append(store)
        return Opened(store)

    yield make
    for store in stores:
        store.close()
