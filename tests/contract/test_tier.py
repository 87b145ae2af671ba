from hicache_storage.testing import BackendContract


class TestTierOfMemory(BackendContract):
    url = "tier://?upper=memory%3A%2F%2F&lower=memory%3A%2F%2F"


class TestWriteBackTierOfMemory(BackendContract):
    url = "tier://?upper=memory%3A%2F%2F&lower=memory%3A%2F%2F&write=back"


class TestMemoryInsideAllMiddleware(BackendContract):
    url = "memory://?limit=on&deadline=on&retry=on&breaker=on&existence=on"
