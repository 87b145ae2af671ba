"""Backends that break the clauses on optional hooks, and on opening and closing."""

import os
import threading

from testing.breaking import breaks

from hicache_storage import CapacityExceeded, Store, Usage, hookimpl
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.middleware.around import Around

# -- 8 optional hooks ----------------------------------------------------------------------------


@breaks("8.1")
class DeletesOnlyWhatIsThere(Around):
    @hookimpl
    def delete(self, keys):
        there = [self.inner.exists([key], None) == 1 for key in keys]
        self.inner.delete(keys)
        return there


@breaks("8.2")
class ScansTwice(Around):
    @hookimpl
    def scan(self, prefix):
        found = list(self.inner.scan(prefix))
        return iter([*found, *found[-1:]])


@breaks("8.2")
class ScansTheFirstHundred(Around):
    """Reads one page of a listing."""

    @hookimpl
    def scan(self, prefix):
        return iter(list(self.inner.scan(prefix))[:100])


@breaks("8.2")
class ScansWholeFolders(Around):
    """Takes the prefix for a folder."""

    @hookimpl
    def scan(self, prefix):
        folder = prefix.rpartition("/")[0]
        return self.inner.scan(folder)


@breaks("8.3")
class CountsPagesTwice(Around):
    @hookimpl
    def usage(self):
        usage = self.inner.usage()
        return Usage(2 * usage.pages, usage.stored_bytes)


@breaks("8.4")
class FlushDrops(Around):
    @hookimpl
    def flush(self):
        for page in list(self.inner.scan("")):
            self.inner.delete([page.key])


@breaks("8.5")
class ClearsOneNamespace(Around):
    @hookimpl
    def clear(self):
        pages = list(self.inner.scan(""))
        first = pages[0].key[:32] if pages else ""
        self.inner.delete([page.key for page in pages if page.key.startswith(first)])


class _Bounded:
    """Says that it has a capacity."""

    Config = MemoryConfig

    def __init__(self, where, capacity=None):
        self.inner_backend = MemoryBackend(MemoryConfig())
        self.capacity = capacity
        for name in ("batch_get", "exists", "delete", "scan"):
            setattr(self, name, getattr(self.inner_backend, name))

    @hookimpl
    def usage(self):
        usage = self.inner_backend.usage()
        return Usage(usage.pages, min(usage.stored_bytes, self.capacity or 1), self.capacity)


@breaks("8.6")
class KeepsNoCapacity(_Bounded):
    @hookimpl
    def batch_set(self, keys, pages):
        return self.inner_backend.batch_set(keys, pages)


@breaks("8.6")
class RaisesWhenFull(_Bounded):
    @hookimpl
    def batch_set(self, keys, pages):
        if self.capacity and self.inner_backend.usage().stored_bytes > self.capacity:
            raise CapacityExceeded("full", backend="broken", operation="batch_set")
        return self.inner_backend.batch_set(keys, pages)


# -- 9 opening and closing -----------------------------------------------------------------------


class _ClosesTwice(Store):
    def close(self):
        self._caller.close()


@breaks("9.2")
class CannotCloseTwice(Around):
    store_class = _ClosesTwice

    def __init__(self, inner):
        super().__init__(inner)
        self.closed = False

    @hookimpl
    def close(self):
        if self.closed:
            raise ValueError("closed already")
        self.closed = True


@breaks("9.2")
class CannotCloseUnused(Around):
    used = False

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        self.used = True
        return self.inner.batch_set(keys, pages, prefix_keys)

    @hookimpl
    def close(self):
        if not self.used:
            raise AttributeError("no connection was made yet")


class _NeverCloses(Store):
    def _check_open(self):
        pass


@breaks("9.3")
class WorksAfterClose(Around):
    store_class = _NeverCloses


@breaks("9.4")
class LeaksADescriptor(Around):
    @hookimpl
    def open(self):
        self.descriptor = os.open("/dev/null", os.O_RDONLY)


@breaks("9.5")
class LeaksAThread(Around):
    @hookimpl
    def open(self):
        self.stop = threading.Event()
        threading.Thread(target=self.stop.wait, args=(20,), name="left", daemon=True).start()
