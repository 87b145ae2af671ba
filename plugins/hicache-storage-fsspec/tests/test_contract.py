"""The conformance kit on local files, on memory and through s3fs on a real server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from s3_servers import Server, seaweedfs
from s3fs_stores import s3fs_mapping

from hicache_storage.testing import BackendContract

__all__ = ["seaweedfs"]


class TestLocalFiles(BackendContract):
    url = "fsspec://file{tmp_path}/pages"


class TestMemory(BackendContract):
    def make(self, tmp_path: Path) -> str:
        return f"fsspec://memory/{uuid.uuid4().hex}"


@pytest.mark.servers
class TestS3fs(BackendContract):
    timeout_s = 120.0

    @pytest.fixture
    def where(self, seaweedfs: Server) -> dict[str, Any]:
        return s3fs_mapping(seaweedfs)
