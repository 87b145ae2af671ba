"""Section 2, whole pages; section 4, damaged pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from mmap import mmap

from ...keys import stored_key
from ...page import HEADER_BYTES
from ..bench import Bench, buffers_for
from ..clause import clause, expect, expect_equal
from ..worker import content


def _round_trip(bench: Bench, sizes: list[int], parts_set: int, parts_get: int) -> None:
    for size in sizes:
        namespace = bench.namespace(size)
        keys, pages = bench.keys(3), bench.pages(3, size)
        given = [bench.split(page, min(parts_set, size)) for page in pages]
        stored = bench.store.batch_set(namespace, keys, given)
        case = f"pages of {size} bytes in {parts_set} spans"
        expect_equal(stored, [True] * 3, f"batch_set of {case}")
        buffers = [bench.split(bytes(size), min(parts_get, size)) for _ in pages]
        hits = bench.store.batch_get(namespace, keys, buffers)
        expect_equal(hits, [True] * 3, f"batch_get into {parts_get} spans of {case}")
        found = [b"".join(spans) for spans in buffers]
        expect(found == pages, f"{case} came back changed in {parts_get} spans")


@clause("2.1", "A page comes back byte for byte, in any number of spans")
def spans_of_a_page(bench: Bench) -> None:
    """One span for a contiguous page, twice the layers for a layer-first one (2, 64, 160, 252),
    and more than a vectored call takes at once (1100). A page written in some spans is read in
    others: their borders are not part of it. A span may be empty."""
    for parts in (1, 2, 3, 64, 160, 252, 1100):
        _round_trip(bench, [3001], parts, parts)
    _round_trip(bench, [3001], 1, 160)
    _round_trip(bench, [3001], 160, 1)
    _round_trip(bench, [3001], 7, 13)
    namespace, page, empty = bench.namespace(100), bench.page(100), memoryview(bytearray())
    view = memoryview(page)
    keys = bench.keys(1)
    stored = bench.store.batch_set(namespace, keys, [(empty, view[:40], empty, view[40:], empty)])
    expect_equal(stored, [True], "batch_set of a page with empty spans")
    buffer = bytearray(100)
    spans = (memoryview(buffer)[:70], empty, memoryview(buffer)[70:])
    expect_equal(
        bench.store.batch_get(namespace, keys, [spans]), [True], "batch_get, an empty span"
    )
    expect(buffer == page, "a page with empty spans came back changed")


@clause("2.2", "Pages and spans of any size come back")
def sizes_of_a_page(bench: Bench) -> None:
    """Pages of 1 byte, of spans of one byte each, of odd and random sizes below 4096, and of sizes
    just around 4096."""
    _round_trip(bench, [1, 2, 3, 7, 63, 64, 65], 1, 1)
    _round_trip(bench, [17, 255], 1024, 1024)
    random_sizes = [bench.random.randrange(1, 4096) for _ in range(8)]
    _round_trip(bench, [*random_sizes, 4095, 4096, 4097], 5, 4)


@clause("2.3", "A page of 8 MiB comes back")
def large_page(bench: Bench) -> None:
    """As one span and as 64, into memory of the operating system's own as pinned memory is;
    large models have pages of this size."""
    size = 8 << 20
    namespace = bench.namespace(size)
    keys, page = bench.keys(2), bench.page(size)
    spans = bench.split(page, 64)
    stored = bench.store.batch_set(namespace, keys, [page, spans])
    expect_equal(stored, [True] * 2, "batch_set of two pages of 8 MiB")
    buffers = [memoryview(mmap(-1, size)) for _ in keys]
    hits = bench.store.batch_get(namespace, keys, buffers)
    expect_equal(hits, [True] * 2, "batch_get of two pages of 8 MiB")
    expect(all(buffer == page for buffer in buffers), "a page of 8 MiB came back changed")


@clause("2.4", "Setting the same page again changes nothing")
def set_same_twice(bench: Bench) -> None:
    """It is answered True and the page stays readable; whether it is written again is up to the
    backend."""
    namespace = bench.namespace()
    keys, pages = bench.keys(4), bench.pages(4)
    for round_number in (1, 2, 3):
        stored = bench.store.batch_set(namespace, keys, pages)
        expect_equal(stored, [True] * 4, f"batch_set, time {round_number}")
    buffers = buffers_for(namespace, 4)
    expect_equal(bench.store.batch_get(namespace, keys, buffers), [True] * 4, "batch_get")
    expect([bytes(b) for b in buffers] == pages, "setting a page again changed it")


@clause("2.5", "Setting another page under a key replaces the first")
def set_other_content(bench: Bench) -> None:
    """The last page set is the one read: another payload of the same length, and as the backend
    sees it, longer and shorter ones."""
    namespace = bench.namespace()
    keys, old, new = bench.keys(4), bench.pages(4), bench.pages(4)
    bench.store.batch_set(namespace, keys, old)
    expect_equal(bench.store.batch_set(namespace, keys, new), [True] * 4, "batch_set, other pages")
    buffers = buffers_for(namespace, 4)
    expect_equal(bench.store.batch_get(namespace, keys, buffers), [True] * 4, "batch_get")
    expect([bytes(b) for b in buffers] == new, "after a second batch_set the first page is read")
    for size in (2000, 30, 512):
        other = bench.namespace(size)
        name, page = stored_key(namespace.digest, keys[0]), bench.page(size)
        frame = bench.framed(other, keys[0], page)
        expect_equal(bench.raw().batch_set([name], [frame], None), [True], f"{size} bytes over it")
        spans = (memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(size)))
        expect_equal(bench.raw().batch_get([name], [spans], None), [True], f"{size} bytes read")
        expect(spans[1] == page, f"a page of {size} bytes did not replace one of another length")


@clause("2.6", "A page of another length is a miss")
def wrong_length(bench: Bench) -> None:
    """If the stored page is one byte, or much, longer or shorter than the buffers, the answer is
    False: neither a part of it nor an error. Its neighbours are read."""
    namespace = bench.namespace(512)
    names, frames = [], []
    for size in (511, 512, 513, 1, 5000, 512):
        key = bench.keys(1)[0]
        names.append(stored_key(namespace.digest, key))
        frames.append(bench.framed(bench.namespace(size), key, bench.page(size)))
    expect_equal(bench.raw().batch_set(names, frames, None), [True] * 6, "batch_set, six lengths")
    buffers = [(memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(512))) for _ in names]
    hits = bench.raw().batch_get(names, list(buffers), None)
    wanted = [False, True, False, False, False, True]
    expect_equal(hits, wanted, "batch_get for 512 bytes of pages with 511 512 513 1 5000 512")


@clause("2.7", "After kill -9 of a writer every page is whole or missing", needs=["persistent"])
def killed_writer(bench: Bench) -> None:
    """A process that writes batches of pages, new ones or over older ones, is killed at any moment.
    Whoever opens the store then finds each page whole, the new or the older one, or not at all;
    finds what was flushed before, and can write."""
    for round_number in range(6):
        size = 256 << 10
        namespace = bench.namespace(size)
        keys = bench.keys(96)
        older = [content(1000 + i, size) for i in range(len(keys))] if round_number % 2 else []
        if older:
            with bench.open() as store:
                store.batch_set(namespace, keys, older)
        writer = bench.spawn(
            "write_until_killed", namespace=namespace.canonical, keys=keys, batch=4
        )
        done = writer.answer()["done"]
        deadline_s = time.monotonic() + 0.02 + 0.1 * bench.random.random()
        while done < len(keys) and time.monotonic() < deadline_s:
            done = writer.answer()["done"]
        time.sleep(0.005 * bench.random.random())
        writer.kill()
        store = bench.open()
        whole = 0
        for i, key in enumerate(keys):
            found = bench.stored(namespace, key, store)
            if found is not None:
                expect(
                    found[HEADER_BYTES:] in [content(i, size), *older[i : i + 1]],
                    f"page {i} was read in part after the writer was killed "
                    f"(round {round_number}, {done} pages acknowledged)",
                )
                whole += 1
                new = found[HEADER_BYTES:] == content(i, size)
                expect(i >= 4 or new, f"page {i}, flushed before the kill, is an older one")
            expect(i >= 4 or found is not None, f"page {i}, flushed before the kill, is gone")
        page = bench.page(size)
        stored = store.batch_set(namespace, keys[-1:], [page])
        expect_equal(stored, [True], f"batch_set after the kill ({whole} whole pages found)")
        buffer = bytearray(size)
        expect_equal(store.batch_get(namespace, keys[-1:], [buffer]), [True], "batch_get after it")
        expect(buffer == page, "a page written after the kill came back changed")
        store.close()


# -- damaged pages -----------------------------------------------------------------------------


Change = Callable[[int, bytes], bytes]
"""From a place in the batch and the stored bytes (header and payload) to the damaged ones."""


def _damage(bench: Bench, count: int, change: Change, what: str, size: int = 512) -> None:
    """Stores pages, damages each, and expects each to be a miss and then writable again."""
    namespace, store = bench.namespace(size), bench.store
    keys, pages = bench.keys(count), bench.pages(count, size)
    all_true = [True] * count
    expect_equal(store.batch_set(namespace, keys, pages), all_true, "batch_set of good pages")
    for i, (key, page) in enumerate(zip(keys, pages, strict=True)):
        good = b"".join(bench.framed(namespace, key, page))
        bench.tamper(namespace, key, change(i, good))
    hits = store.batch_get(namespace, keys, buffers_for(namespace, count))
    taken = [i for i, hit in enumerate(hits) if hit]
    expect(not taken, f"{what} was taken for a good page (cases {taken[:8]} of {count})")
    expect_equal(store.batch_set(namespace, keys, pages), all_true, f"batch_set over {what}")
    buffers = buffers_for(namespace, count)
    hits = store.batch_get(namespace, keys, buffers)
    expect_equal(hits, all_true, f"batch_get of pages set anew over {what}")
    expect([bytes(b) for b in buffers] == pages, f"a page set anew over {what} is wrong")


def _flip(bench: Bench, stored: bytes, offset: int) -> bytes:
    changed = bytearray(stored)
    changed[offset] ^= 1 << bench.random.randrange(8)
    return bytes(changed)


@clause("4.1", "A truncated page is a miss, and can be set anew")
def truncated_page(bench: Bench) -> None:
    """Cut by one byte, cut to its header, into its header, to one byte: the answer is False. The
    page set again is then read, though its header may have been intact all the time."""
    ends = [512 + 63, HEADER_BYTES + 1, HEADER_BYTES, HEADER_BYTES - 1, 1]
    _damage(bench, len(ends), lambda i, stored: stored[: ends[i]], "a truncated page")


@clause("4.2", "A flipped bit anywhere in the header is a miss")
def flipped_header(bench: Bench) -> None:
    """Each of the 64 header bytes is changed in turn. The page can be set anew."""
    _damage(bench, HEADER_BYTES, lambda i, stored: _flip(bench, stored, i), "a flipped header")


@clause("4.3", "A flipped bit in the payload is a miss")
def flipped_payload(bench: Bench) -> None:
    """The first byte, the last, and some between them, one bit each. The page can be set anew."""
    size = 5000
    offsets = [0, 1, size // 2, size - 2, size - 1]
    offsets += [bench.random.randrange(size) for _ in range(11)]

    def change(i: int, stored: bytes) -> bytes:
        return _flip(bench, stored, HEADER_BYTES + offsets[i])

    _damage(bench, len(offsets), change, "a flipped payload", size)


@clause("4.4", "A page of another key or namespace is a miss")
def foreign_page(bench: Bench) -> None:
    """A good page that lies under the wrong name (a copied file, a mixed-up index) is not used:
    one of another key, of the draft, of another namespace with pages of the same length, and
    zeros, and random bytes."""
    namespace, other = bench.namespace(512), bench.namespace(512, dtype="float8_e4m3fn")
    key = bench.keys(1)[0]
    draft = f"d:{key}"
    bench.note_keys([draft])
    page = bench.page(512)
    foreign = [
        b"".join(bench.framed(namespace, key, page)),
        b"".join(bench.framed(namespace, draft, page)),
        bytes(HEADER_BYTES + 512),
        bench.page(HEADER_BYTES + 512),
    ]
    _damage(bench, len(foreign), lambda i, _: foreign[i], "a foreign page")
    for name in (key, draft):
        in_other = b"".join(bench.framed(other, name, page))
        bench.tamper(namespace, name, in_other)
        hits = bench.store.batch_get(namespace, [name], buffers_for(namespace, 1))
        expect_equal(hits, [False], f"batch_get of {name[:2]}..., a page of another namespace")


@clause("4.5", "A page proven bad is not found again", needs=["delete"])
def bad_page_is_put_aside(bench: Bench) -> None:
    """Once a read has shown it to be bad, `exists` ends before it, so that the engine computes
    and stores it again."""
    namespace = bench.namespace()
    keys, pages = bench.keys(4), bench.pages(4)
    bench.store.batch_set(namespace, keys, pages)
    good = b"".join(bench.framed(namespace, keys[2], pages[2]))
    bench.tamper(namespace, keys[2], _flip(bench, good, 300))
    hits = bench.store.batch_get(namespace, keys, buffers_for(namespace, 4))
    expect_equal(hits, [True, True, False, True], "batch_get with a bad page at 2")
    expect_equal(bench.store.exists(namespace, keys), 2, "exists after a bad page was read at 2")
    expect_equal(bench.store.counts.corrupt_pages, 1, "pages counted as corrupt")
