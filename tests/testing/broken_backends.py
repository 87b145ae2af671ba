"""Backends that break one clause each, to show that the clause can fail, and some that break none.

`open_broken({"fault": name, "inner": where}, ...)` opens one; other processes find it by name.
"""

import fcntl
import os
import threading

# Importing them registers their backends.
from testing import broken_answers, broken_hooks, broken_pages, broken_threads  # noqa: F401
from testing.breaking import BACKENDS, Folder, breaks

from hicache_storage import BackendUnavailable, Store, hookimpl
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.calling import Caller
from hicache_storage.middleware.around import Around


class Reference(MemoryBackend):
    """Breaks nothing and has every hook."""

    @hookimpl
    def flush(self):
        pass


def open_broken(where, *, wrappers=(), **options):
    cls = BACKENDS[where["fault"]]
    if issubclass(cls, Around):
        backend = cls(Caller(Reference(MemoryConfig(**options)), name="inner"))
    else:
        backend = cls(where, **options)
    store_class = getattr(cls, "store_class", Store)
    store = store_class(backend, name="broken", wrappers=wrappers)
    store.open()
    return store


# -- backends that keep the contract ---------------------------------------------------------------


@breaks()
class OneProcessAtATime(Folder):
    """As a store that locks its files: a second opening is refused."""

    scope = "exclusive"

    def write(self, key, page):
        temporary = self.path(f"{key}.{threading.get_ident()}.tmp")
        temporary.write_bytes(page)
        temporary.replace(self.path(key))

    @hookimpl
    def open(self):
        self.root.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self.lock)
            raise BackendUnavailable("locked", backend="broken", operation="open") from error

    @hookimpl
    def close(self):
        os.close(self.lock)


# -- the kit itself ------------------------------------------------------------------------------


@breaks()
class Hangs(Around):
    """Doesn't come back from a read."""

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        threading.Event().wait(20)
        return [False] * len(keys)


@breaks()
class CannotDelete(Around):
    delete = None


@breaks()
class BreaksNothing(Around):
    pass
