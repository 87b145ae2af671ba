"""Section 5, buffers."""

from __future__ import annotations

from ..bench import Bench, Guarded, buffers_for
from ..clause import clause, expect, expect_equal


@clause("5.1", "Nothing outside of the buffers is written, on a hit or on a miss")
def guard_bytes(bench: Bench) -> None:
    """Memory around each span keeps its bytes, also when the page is missing, and when the stored
    page is longer or shorter than the buffers are."""
    namespace, longer = bench.namespace(500), bench.namespace(900)
    shorter = bench.namespace(100)
    keys = bench.keys(3)
    bench.store.batch_set(namespace, keys[:2], bench.pages(2, 500))
    # The same stored keys with pages of other lengths: as the backend alone sees them.
    names = [f"{namespace.digest}/{key}" for key in keys]
    for title, other in (("a longer", longer), ("a shorter", shorter)):
        name = f"{namespace.digest}/{bench.keys(1)[0]}"
        page = bench.framed(other, name.rpartition("/")[2], bench.page(other.page_bytes))
        bench.raw().batch_set([name], [page], None)
        _read_guarded(bench, [*names, name], f"with {title} page stored under the last key")


def _read_guarded(bench: Bench, names: list[str], case: str) -> None:
    pieces = [[Guarded(size) for size in (64, 1, 250, 249)] for _ in names]
    spans = [tuple(piece.view for piece in page) for page in pieces]
    hits = bench.raw().batch_get(names, spans, None)
    expect_equal(hits, [True, True, False, False], f"batch_get {case}")
    for i, page in enumerate(pieces):
        for j, piece in enumerate(page):
            expect(piece.intact, f"bytes next to span {j} of key {i} were overwritten, {case}")


@clause("5.2", "After batch_set returns, the caller may reuse its pages")
def reuse_after_set(bench: Bench) -> None:
    """No span is kept: what the caller writes into its memory after the call doesn't reach the
    store, at once or later."""
    namespace = bench.namespace(4096)
    keys, pages = bench.keys(8), bench.pages(8, 4096)
    memory = [bytearray(page) for page in pages]
    bench.store.batch_set(namespace, keys, memory)
    for buffer in memory:
        buffer[:] = b"\xee" * 4096
    bench.store.flush()
    buffers = buffers_for(namespace, 8)
    hits = bench.store.batch_get(namespace, keys, buffers)
    expect_equal(hits, [True] * 8, "batch_get after the written memory was reused")
    expect([bytes(b) for b in buffers] == pages, "memory reused after batch_set changed the store")


@clause("5.3", "After batch_get returns, the caller owns its buffers")
def reuse_after_get(bench: Bench) -> None:
    """Buffers aren't views into the store: writing to them doesn't change what is stored, and
    nothing is written to them after the call, hit or miss."""
    namespace = bench.namespace(4096)
    keys, pages = bench.keys(9), bench.pages(8, 4096)
    bench.store.batch_set(namespace, keys[:8], pages)
    buffers = buffers_for(namespace, 9)
    bench.store.batch_get(namespace, keys, buffers)
    for buffer in buffers:
        buffer[:] = b"\xee" * 4096
    again = buffers_for(namespace, 8)
    hits = bench.store.batch_get(namespace, keys[:8], again)
    expect_equal(hits, [True] * 8, "batch_get after the read buffers were reused")
    expect([bytes(b) for b in again] == pages, "writing to read buffers changed the store")
    expect(all(b == b"\xee" * 4096 for b in buffers), "a buffer was written to after its call")
