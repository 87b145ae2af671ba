from pathlib import Path

import pytest
from s3_servers import Server, seaweedfs

from hicache_storage.testing import BackendContract

__all__ = ["seaweedfs"]


class TestTierOfMemory(BackendContract):
    url = "tier://?upper=memory%3A%2F%2F&lower=memory%3A%2F%2F"


class TestWriteBackTierOfMemory(BackendContract):
    url = "tier://?upper=memory%3A%2F%2F&lower=memory%3A%2F%2F&write=back"


class TestMemoryInsideAllMiddleware(BackendContract):
    url = "memory://?limit=on&deadline=on&retry=on&breaker=on&existence=on"


@pytest.mark.servers
class TestTierOfLmdbOverS3(BackendContract):
    write = "through"

    @pytest.fixture
    def where(self, tmp_path: Path, seaweedfs: Server) -> dict[str, str]:
        return {
            "backend": "tier",
            "upper": f"lmdb://{tmp_path}/upper",
            "lower": seaweedfs.store_url(),
            "write": self.write,
        }


@pytest.mark.servers
class TestWriteBackTierOfLmdbOverS3(TestTierOfLmdbOverS3):
    write = "back"
