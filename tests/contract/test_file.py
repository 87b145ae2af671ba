from pathlib import Path

import pytest

from hicache_storage import Store
from hicache_storage.backends.file.names import page_place
from hicache_storage.testing import BackendContract


class FileContract(BackendContract):
    """Damages a page where it lies, as a failing disk would."""

    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> None:
        self._root = tmp_path / "root"

    def tamper(self, store: Store, key: str, stored: bytes) -> None:
        place, name = page_place(key)
        path = self._root / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored)


class TestFile(FileContract):
    url = "file://{tmp_path}/root"


class TestFileWithThreads(FileContract):
    url = "file://{tmp_path}/root?io_threads=4"


class TestFileSynced(FileContract):
    url = "file://{tmp_path}/root?durability=fsync"


class TestFileWithCapacity(FileContract):
    url = "file://{tmp_path}/root?capacity=1GiB"
