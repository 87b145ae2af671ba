"""Backends that break the clauses on whole pages, on damaged pages, and on buffers."""

from testing.breaking import Folder, breaks, copy, own

from hicache_storage import hookimpl
from hicache_storage.middleware.around import Around
from hicache_storage.page import HEADER_BYTES, spans_bytes

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


@breaks("2.7")
class WritesInPlaceSlowly(Folder):
    SLOW_S = 0.002


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
