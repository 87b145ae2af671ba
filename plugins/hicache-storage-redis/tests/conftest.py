"""A Redis server and a cluster of three, started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_servers import BINARY, Server, cluster_of, one_server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    _need_redis()
    with one_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    _need_redis()
    with cluster_of(3, tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


def _need_redis() -> None:
    if BINARY is None:
        pytest.skip("no redis-server here: apt-get install redis-server")
