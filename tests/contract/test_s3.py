import pytest
from s3_servers import Server, moto, seaweedfs

from hicache_storage.testing import BackendContract

__all__ = ["moto", "seaweedfs"]


@pytest.mark.servers
class TestS3OnSeaweedFS(BackendContract):
    @pytest.fixture
    def where(self, seaweedfs: Server) -> str:
        return seaweedfs.store_url()


@pytest.mark.servers
class TestS3ConditionalOnSeaweedFS(BackendContract):
    @pytest.fixture
    def where(self, seaweedfs: Server) -> str:
        return seaweedfs.store_url(conditional_writes=True, checksums="when_supported")


@pytest.mark.servers
class TestS3OnMoto(BackendContract):
    @pytest.fixture
    def where(self, moto: Server) -> str:
        return moto.store_url(sign_payload=True)
