"""Backends that break one clause each, to show that the clause can fail.

`open_broken({"fault": name, "inner": where}, ...)` opens one; other processes find it by name.
"""

import fcntl
import os
import sqlite3
import threading
import time
from pathlib import Path

from hicache_storage import (
    BackendUnavailable,
    CapacityExceeded,
    Store,
    Usage,
    hookimpl,
)
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.calling import Caller
from hicache_storage.middleware.around import Around
from hicache_storage.page import HEADER_BYTES, spans_bytes

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


def own(spans):
    """Buffers of the same lengths."""
    return tuple(memoryview(bytearray(len(span))) for span in spans)


def copy(spans, page):
    start = 0
    for span in spans:
        part = page[start : start + len(span)]
        span[: len(part)] = part
        start += len(span)


# -- 1 answers -----------------------------------------------------------------------------------


@breaks("1.1")
class AnswersInOrderOfWork(Around):
    """Sorts the keys to work on them, and forgets to sort back."""

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        order = sorted(range(len(keys)), key=lambda i: keys[i])
        sorted_keys = [keys[i] for i in order]
        return self.inner.batch_get(sorted_keys, [buffers[i] for i in order], prefix_keys)


class _AsksForNothing(Store):
    def batch_set(self, namespace, keys, pages, prefix_keys=None):
        if not keys:
            return self._caller.batch_set([], [], None)
        return super().batch_set(namespace, keys, pages, prefix_keys)


@breaks("1.2")
class EmptyBatchesGoIn(Around):
    store_class = _AsksForNothing


@breaks("1.3")
class MissSpoilsTheBatch(Around):
    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = self.inner.batch_get(keys, buffers, prefix_keys)
        return hits if all(hits) else [False] * len(hits)


@breaks("1.3")
class MissRaises(Around):
    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = self.inner.batch_get(keys, buffers, prefix_keys)
        if not any(hits):
            raise KeyError(keys[0])
        return hits


@breaks("1.4")
class ForgetsBeyond128(Around):
    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = self.inner.batch_get(keys[:128], buffers[:128], prefix_keys)
        return hits + [False] * (len(keys) - 128)


@breaks("1.5")
class AnswersByKey(Around):
    """Gathers the batch in a dict, so that equal keys become one."""

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        by_key = dict(zip(keys, buffers, strict=True))
        hits = self.inner.batch_get(list(by_key), list(by_key.values()), prefix_keys)
        found = dict(zip(by_key, hits, strict=True))
        return [found[key] for key in keys]


@breaks("1.6")
class PlacesByPrefix(Around):
    """Puts a page where its prefix says, and looks for it there alone."""

    def _placed(self, keys, prefix_keys):
        if not prefix_keys:
            return keys
        tail = prefix_keys[-1][-8:]
        return [key[:-8] + tail for key in keys]

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        return self.inner.batch_set(self._placed(keys, prefix_keys), pages, prefix_keys)

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        return self.inner.batch_get(self._placed(keys, prefix_keys), buffers, prefix_keys)


@breaks("1.7")
class AnswersWithTuples(Around):
    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        return tuple(self.inner.batch_get(keys, buffers, prefix_keys))


@breaks("1.7")
class AnswersWithNone(Around):
    @hookimpl
    def exists(self, keys, prefix_keys):
        return self.inner.exists(keys, prefix_keys) or None


@breaks("1.8")
class SortsTheCallersKeys(Around):
    @hookimpl
    def exists(self, keys, prefix_keys):
        run = self.inner.exists(keys, prefix_keys)
        keys.sort()
        return run


@breaks("1.8")
class EatsTheCallersKeys(Around):
    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        answers = []
        while keys:
            answers += self.inner.batch_set([keys.pop(0)], [pages.pop(0)], prefix_keys)
        return answers


# -- 2 whole pages -------------------------------------------------------------------------------


@breaks("2.1")
class WritesAtMost1024Spans(Around):
    """One vectored call takes 1024 parts; the rest is lost."""

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        spans = [own(buffer) for buffer in buffers]
        hits = self.inner.batch_get(keys, spans, prefix_keys)
        for buffer, span in zip(buffers, spans, strict=True):
            copy(buffer[:1024], b"".join(span[:1024]))
        return hits


@breaks("2.2")
class WholeSectors(Around):
    """Moves whole 16-byte units only."""

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        spans = [own(buffer) for buffer in buffers]
        hits = self.inner.batch_get(keys, spans, prefix_keys)
        for buffer, span in zip(buffers, spans, strict=True):
            page = b"".join(span)
            copy(buffer, page[: len(page) // 16 * 16])
        return hits


@breaks("2.3")
class RefusesLargePages(Around):
    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        stored = self.inner.batch_set(keys, pages, prefix_keys)
        small = [spans_bytes(page) < 4 << 20 for page in pages]
        return [a and b for a, b in zip(stored, small, strict=True)]


@breaks("2.4")
class RefusesWhatIsThere(Around):
    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        there = [self.inner.exists([key], None) == 1 for key in keys]
        stored = self.inner.batch_set(keys, pages, prefix_keys)
        return [a and not b for a, b in zip(stored, there, strict=True)]


@breaks("2.5")
class KeepsTheFirst(Around):
    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        new = [i for i, key in enumerate(keys) if not self.inner.exists([key], None)]
        if new:
            self.inner.batch_set([keys[i] for i in new], [pages[i] for i in new], prefix_keys)
        return [True] * len(keys)


@breaks("2.6")
class GivesTheBeginning(Around):
    """A longer page is a hit for shorter buffers."""

    def __init__(self, inner):
        super().__init__(inner)
        self.sizes = {}

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        self.sizes.update((k, spans_bytes(p)) for k, p in zip(keys, pages, strict=True))
        return self.inner.batch_set(keys, pages, prefix_keys)

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = []
        for key, buffer in zip(keys, buffers, strict=True):
            whole = memoryview(bytearray(self.sizes.get(key, 1)))
            hit = self.inner.batch_get([key], [(whole,)], None)[0]
            if hit and len(whole) >= spans_bytes(buffer):
                copy(buffer, bytes(whole))
            hits.append(hit and len(whole) >= spans_bytes(buffer))
        return hits


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


@breaks("2.7")
class WritesInPlaceSlowly(Folder):
    SLOW_S = 0.002


@breaks("7.3")
class WritesInPlace(Folder):
    SLOW_S = 0.0002


# -- 3 the leading run ---------------------------------------------------------------------------


@breaks("3.1")
class CountsWhatIsThere(Around):
    @hookimpl
    def exists(self, keys, prefix_keys):
        return sum(self.inner.exists([key], None) for key in keys)


@breaks("3.2")
class BelievesTheLastKey(Around):
    """If the last page is there, all before it must be."""

    @hookimpl
    def exists(self, keys, prefix_keys):
        if self.inner.exists(keys[-1:], None) and self.inner.exists(keys[:1], None):
            return len(keys)
        return self.inner.exists(keys, prefix_keys)


@breaks("3.3")
class RemembersMisses(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.missing = set()

    @hookimpl
    def exists(self, keys, prefix_keys):
        run = self.inner.exists(keys, prefix_keys)
        run = next((i for i, key in enumerate(keys[:run]) if key in self.missing), run)
        self.missing.update(keys[run : run + 1])
        return run


@breaks("3.4")
class LooksInOneNamespace(Around):
    """All keys of a call are taken to be of the first one's."""

    @hookimpl
    def exists(self, keys, prefix_keys):
        space = keys[0].partition("/")[0]
        return self.inner.exists([f"{space}/{key.partition('/')[2]}" for key in keys], None)


# -- 4 damaged pages -----------------------------------------------------------------------------


@breaks("4.1")
class ComparesHeadersAlone(Around):
    """Doesn't write a page whose header is stored, although the rest of it may be cut."""

    def __init__(self, inner):
        super().__init__(inner)
        self.headers = {}

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        for key, page in zip(keys, pages, strict=True):
            header = bytes(page[0])[:HEADER_BYTES]
            if self.headers.get(key) != header or len(header) < HEADER_BYTES:
                self.inner.batch_set([key], [page], None)
            self.headers[key] = header
        return [True] * len(keys)


@breaks("4.5", "8.1")
class PretendsToDelete(Around):
    @hookimpl
    def delete(self, keys):
        return [True] * len(keys)


# -- 5 buffers -----------------------------------------------------------------------------------


@breaks("5.1")
class ClearsTheWholeMemory(Around):
    """Zeroes the memory of a miss, also round the buffers."""

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = self.inner.batch_get(keys, buffers, prefix_keys)
        for hit, buffer in zip(hits, buffers, strict=True):
            for span in buffer if not hit else ():
                memory = span.obj
                memory[:] = bytes(len(memory))
        return hits


@breaks("5.2")
class KeepsSpans(Around):
    """Writes later, from the caller's memory."""

    def __init__(self, inner):
        super().__init__(inner)
        self.queue = []

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        self.queue.append((keys, pages))
        return [True] * len(keys)

    def _drain(self):
        while self.queue:
            keys, pages = self.queue.pop(0)
            self.inner.batch_set(keys, pages, None)

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        self._drain()
        return self.inner.batch_get(keys, buffers, prefix_keys)

    @hookimpl
    def exists(self, keys, prefix_keys):
        self._drain()
        return self.inner.exists(keys, prefix_keys)


@breaks("5.3")
class CachesTheCallersBuffers(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.cache = {}

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        for key in keys:
            self.cache.pop(key, None)
        return self.inner.batch_set(keys, pages, prefix_keys)

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = self.inner.batch_get(keys, buffers, prefix_keys)
        for key, hit, buffer in zip(keys, hits, buffers, strict=True):
            if key in self.cache and spans_bytes(buffer) == spans_bytes(self.cache[key]):
                copy(buffer, b"".join(self.cache[key]))
            elif hit:
                self.cache[key] = buffer
        return hits


# -- 6 keys and namespaces -----------------------------------------------------------------------


class _RenamesKeys(Around):
    def rename(self, key):
        raise NotImplementedError

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        return self.inner.batch_set([self.rename(key) for key in keys], pages, None)

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        return self.inner.batch_get([self.rename(key) for key in keys], buffers, None)

    @hookimpl
    def exists(self, keys, prefix_keys):
        return self.inner.exists([self.rename(key) for key in keys], None)

    @hookimpl
    def delete(self, keys):
        return self.inner.delete([self.rename(key) for key in keys])


@breaks("6.1")
class DropsTheTag(_RenamesKeys):
    def rename(self, key):
        space, _, name = key.partition("/")
        return f"{space}/{name.rpartition(':')[2]}"


@breaks("6.2", "6.3")
class DropsTheNamespace(_RenamesKeys):
    def rename(self, key):
        return "0" * 32 + "/" + key.partition("/")[2]


@breaks("6.3")
class ShortensKeys(_RenamesKeys):
    def rename(self, key):
        return key[: 32 + 1 + 63]


# -- 7 threads and processes ---------------------------------------------------------------------


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
