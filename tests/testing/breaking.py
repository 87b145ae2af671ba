"""What backends that break clauses are made with: their register, pages in files, and copies."""

import os
import time
from pathlib import Path

from hicache_storage import hookimpl
from hicache_storage.page import spans_bytes

BACKENDS = {}
"""By name."""
BREAKS = []
"""(name, number of a clause that it breaks)."""


def breaks(*clauses):
    def register(cls):
        BACKENDS[cls.__name__] = cls
        BREAKS.extend((cls.__name__, clause) for clause in clauses)
        return cls

    return register


def own(spans):
    """Buffers of the same lengths."""
    return tuple(memoryview(bytearray(len(span))) for span in spans)


def copy(spans, page):
    start = 0
    for span in spans:
        part = page[start : start + len(span)]
        span[: len(part)] = part
        start += len(span)


class Folder:
    """Pages as files written in place: first their length, then their bytes."""

    SLOW_S = 0.0
    scope = "shared"

    def __init__(self, where):
        self.root = Path(where["inner"])

    def path(self, key):
        return self.root / key.replace("/", "_")

    @hookimpl
    def open(self):
        self.root.mkdir(parents=True, exist_ok=True)

    @hookimpl
    def batch_set(self, keys, pages):
        for key, page in zip(keys, pages, strict=True):
            self.write(key, b"".join(page))
        return [True] * len(keys)

    def write(self, key, page):
        descriptor = os.open(self.path(key), os.O_WRONLY | os.O_CREAT)
        try:
            os.ftruncate(descriptor, len(page))
            for start in range(0, len(page), 1 << 16):
                os.pwrite(descriptor, page[start : start + (1 << 16)], start)
                time.sleep(self.SLOW_S)
        finally:
            os.close(descriptor)

    @hookimpl
    def batch_get(self, keys, buffers):
        return [self.read(key, spans) for key, spans in zip(keys, buffers, strict=True)]

    def read(self, key, spans):
        try:
            page = self.path(key).read_bytes()
        except FileNotFoundError:
            return False
        if len(page) != spans_bytes(spans):
            return False
        copy(spans, page)
        return True

    @hookimpl
    def exists(self, keys):
        return next((i for i, key in enumerate(keys) if not self.path(key).exists()), len(keys))
