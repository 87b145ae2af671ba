"""The kit on S3 as Ceph speaks it. Not among the tests that are collected: `make ceph` runs it."""

import pytest
from ceph_server import Ceph, start_ceph

from hicache_storage.testing import BackendContract


@pytest.fixture
def ceph() -> Ceph:
    return start_ceph()


@pytest.mark.servers
class TestS3OnCeph(BackendContract):
    @pytest.fixture
    def where(self, ceph: Ceph) -> str:
        return ceph.store_url()


@pytest.mark.servers
class TestS3ConditionalOnCeph(BackendContract):
    @pytest.fixture
    def where(self, ceph: Ceph) -> str:
        return ceph.store_url(conditional_writes=True)
