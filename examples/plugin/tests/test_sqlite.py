from hicache_storage.testing import BackendContract


class TestSqlite(BackendContract):
    url = "sqlite://{tmp_path}/pages.db"
