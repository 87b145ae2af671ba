from hicache_storage.testing import BackendContract


class TestLmdb(BackendContract):
    url = "lmdb://{tmp_path}/pages"


class TestLmdbAsync(BackendContract):
    url = "lmdb://{tmp_path}/pages?durability=async"
