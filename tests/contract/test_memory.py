from hicache_storage.testing import BackendContract


class TestMemory(BackendContract):
    url = "memory://"
