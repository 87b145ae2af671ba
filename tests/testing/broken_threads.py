"""Backends that break the clauses on threads and processes."""

import os
import sqlite3
import threading
import time

from testing.breaking import Folder, breaks, copy, own

from hicache_storage import BackendUnavailable, hookimpl
from hicache_storage.middleware.around import Around


@breaks("7.1")
class OneThreadOnly(Around):
    """As a database handle that belongs to the thread that made it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.thread = threading.get_ident()

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        if threading.get_ident() != self.thread:
            raise sqlite3.ProgrammingError("made in another thread")
        return self.inner.batch_set(keys, pages, prefix_keys)


@breaks("7.1")
class OneScratchBuffer(Around):
    """Reads by way of memory that all threads share."""

    def __init__(self, inner):
        super().__init__(inner)
        self.scratch = None

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = []
        for key, buffer in zip(keys, buffers, strict=True):
            self.scratch = own(buffer)
            hit = self.inner.batch_get([key], [self.scratch], None)[0]
            time.sleep(0)
            copy(buffer, b"".join(self.scratch))
            hits.append(hit)
        return hits


@breaks("7.2")
class OverwritesInMemory(Around):
    """One piece of memory a key, overwritten in two steps."""

    def __init__(self, inner):
        super().__init__(inner)
        self.pages = {}

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        for key, page in zip(keys, pages, strict=True):
            new = b"".join(page)
            memory = self.pages.setdefault(key, bytearray(len(new)))
            memory[: len(new) // 2] = new[: len(new) // 2]
            time.sleep(0.001)
            memory[len(new) // 2 :] = new[len(new) // 2 :]
        return [True] * len(keys)

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        for key, buffer in zip(keys, buffers, strict=True):
            copy(buffer, bytes(self.pages[key]))
        return [True] * len(keys)


@breaks("7.3")
class WritesInPlace(Folder):
    SLOW_S = 0.0002


@breaks("7.4", "9.1")
class SaysThatItIsShared(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.scope = "shared"


@breaks("7.5")
class DiesByFork(Around):
    @hookimpl
    def open(self):
        self.process = os.getpid()

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        if os.getpid() != self.process:
            raise BackendUnavailable("forked", backend="broken", operation="batch_get")
        return self.inner.batch_get(keys, buffers, prefix_keys)
