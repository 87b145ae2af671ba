"""The conformance kit on a real server and on a real cluster."""

from __future__ import annotations

import uuid

import pytest
from redis_servers import Server

from hicache_storage.testing import BackendContract


@pytest.mark.servers
class TestRedis(BackendContract):
    @pytest.fixture
    def where(self, redis_server: Server) -> str:
        return f"redis://{redis_server.address}/{uuid.uuid4().hex}"


@pytest.mark.servers
class TestRedisWithPagesThatExpire(BackendContract):
    @pytest.fixture
    def where(self, redis_server: Server) -> str:
        return f"redis://{redis_server.address}/{uuid.uuid4().hex}?ttl_s=600"


@pytest.mark.servers
class TestRedisCluster(BackendContract):
    @pytest.fixture
    def where(self, redis_cluster: list[Server]) -> str:
        return f"redis://{redis_cluster[0].address}/{uuid.uuid4().hex}?cluster=true"
