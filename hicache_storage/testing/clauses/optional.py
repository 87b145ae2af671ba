"""Section 8, the optional hooks and capacity."""

from __future__ import annotations

from ...errors import CapacityExceeded
from ...hookspecs import StoredPage, Usage
from ...keys import stored_key
from ...page import HEADER_BYTES
from ..bench import Bench, buffers_for
from ..clause import clause, expect, expect_equal


@clause("8.1", "Delete is True once a page is gone, also if it never was there", needs=["delete"])
def delete_pages(bench: Bench) -> None:
    """Deleting is idempotent. A deleted page is a miss for every verb, its neighbours stay, and it
    can be stored again."""
    namespace = bench.namespace()
    keys, pages = bench.keys(6), bench.pages(6)
    store = bench.store
    store.batch_set(namespace, keys, pages)
    gone = [keys[1], *bench.keys(1), keys[4]]
    for time_number in (1, 2):
        expect_equal(store.delete(namespace, gone), [True] * 3, f"delete, time {time_number}")
    hits = store.batch_get(namespace, keys, buffers_for(namespace, 6))
    expect_equal(hits, [True, False, True, True, False, True], "batch_get after delete")
    expect_equal(store.exists(namespace, keys), 1, "exists after delete of page 1")
    expect_equal(store.batch_set(namespace, [keys[1]], [pages[1]]), [True], "batch_set of it again")
    expect_equal(store.exists(namespace, keys), 4, "exists after page 1 was stored again")


@clause("8.2", "Scan gives each stored page once, by the beginning of its key", needs=["scan"])
def scan_pages(bench: Bench) -> None:
    """`scan(prefix)` yields a StoredPage for every stored key that starts with the prefix, and no
    other: for a namespace, a namespace and tag, a part of a hash, a whole key. Its size is that
    of the page or more, its time is plausible if it is given."""
    spaces = [bench.namespace(512, tenant=f"{bench.salt}{i}") for i in range(2)]
    keys, drafts = bench.keys(150), bench.keys(20, tag="d")
    for space in spaces:
        for names in (keys, drafts):
            bench.store.batch_set(space, names, bench.pages(len(names)))
    first = spaces[0].digest
    wanted = {stored_key(first, key) for key in [*keys, *drafts]}
    record = f"{first}/n:{first}"
    prefixes = [
        f"{first}/",
        first[:20],
        f"{first}/d:",
        f"{first}/d",
        f"{first}/{keys[0][:1]}",
        f"{first}/{keys[0][:9]}",
        stored_key(first, keys[0]),
        stored_key(first, drafts[0]),
        f"{first}/x:",
    ]
    for prefix in prefixes:
        found = list(bench.raw().scan(prefix))
        expect(all(type(page) is StoredPage for page in found), "scan must yield StoredPage")
        names = sorted(page.key for page in found)
        right = sorted(name for name in {*wanted, record} if name.startswith(prefix))
        expect(
            names == right,
            f"scan({prefix.replace(first, '<namespace>')!r}): {len(names)} keys instead of "
            f"{len(right)}; missing {sorted(set(right) - set(names))[:2]}, "
            f"too many {sorted(set(names) - set(right))[:2]}, "
            f"{len(names) - len(set(names))} twice",
        )
        for page in found:
            small = page.key != record and page.stored_bytes < HEADER_BYTES + 512
            expect(not small, f"scan says {page.stored_bytes} bytes for a page of 576")
            used_s = page.used_s
            expect(used_s is None or 1.6e9 < used_s < 4e9, f"used_s is not a time: {used_s}")
    everything = {page.key for page in bench.raw().scan("")}
    expect(wanted <= everything, 'scan("") must give every page')


@clause("8.3", "Usage counts what is stored", needs=["usage"])
def count_usage(bench: Bench) -> None:
    """It returns a Usage. Storing pages raises both counts, by as many pages and at least their
    bytes where nobody else writes; the capacity isn't below what is stored."""
    namespace = bench.namespace(4096)
    store = bench.store
    store.batch_set(namespace, bench.keys(1), bench.pages(1, 4096))
    store.flush()
    before = store.usage()
    store.batch_set(namespace, bench.keys(50), bench.pages(50, 4096))
    store.flush()
    after = store.usage()
    for usage in (before, after):
        expect(type(usage) is Usage, "usage must return a Usage")
        expect(usage.pages >= 0 and usage.stored_bytes >= 0, f"a negative count: {usage}")
        capacity = usage.capacity_bytes
        expect(capacity is None or usage.stored_bytes <= capacity, f"above capacity: {usage}")
    if bench.subject.private:
        expect_equal(after.pages - before.pages, 50, "pages that usage counts for 50 new ones")
        grown = after.stored_bytes - before.stored_bytes
        expect(grown >= 50 * 4096, f"50 pages of 4096 bytes raise stored_bytes by {grown}")


@clause("8.4", "Flush returns, and what was stored before is there", needs=["flush"])
def flush_pages(bench: Bench) -> None:
    """With pages to write, without any, twice in a row, and beside other calls."""
    namespace = bench.namespace()
    keys, pages = bench.keys(20), bench.pages(20)
    bench.store.flush()
    bench.store.batch_set(namespace, keys, pages)
    bench.store.flush()
    bench.store.flush()
    buffers = buffers_for(namespace, 20)
    expect_equal(bench.store.batch_get(namespace, keys, buffers), [True] * 20, "batch_get")
    expect([bytes(b) for b in buffers] == pages, "flush changed a page")


@clause("8.5", "Clear removes every page, and the store goes on", needs=["clear", "empty"])
def clear_pages(bench: Bench) -> None:
    """All namespaces are emptied; a page can be stored and found at once after that, and the
    namespace's readable record is written again."""
    spaces = [bench.namespace(512, tenant=f"{bench.salt}{i}") for i in range(2)]
    keys, pages = bench.keys(30, tag="d"), bench.pages(30)
    store = bench.store
    for space in spaces:
        store.batch_set(space, keys, pages)
    bench.check_alone()
    store.clear()
    for space in spaces:
        expect_equal(store.exists(space, keys), 0, "exists after clear")
        hits = store.batch_get(space, keys, buffers_for(space, 30))
        expect_equal(hits, [False] * 30, "batch_get after clear")
    if "scan" in store.capabilities:
        expect_equal(list(store.scan()), [], "scan after clear")
    if "usage" in store.capabilities:
        expect_equal(store.usage().pages, 0, "pages that usage counts after clear")
    store.clear()
    expect_equal(store.batch_set(spaces[0], keys, pages), [True] * 30, "batch_set after clear")
    buffers = buffers_for(spaces[0], 30)
    expect_equal(store.batch_get(spaces[0], keys, buffers), [True] * 30, "batch_get after it")
    if "scan" in store.capabilities:
        expect_equal(store.namespaces(), {spaces[0].digest: spaces[0]}, "namespaces after clear")


@clause(
    "8.6", "A full store refuses or makes room, and keeps reading", needs=["capacity", "private"]
)
def full_store(bench: Bench) -> None:
    """With four times as many pages as fit, `batch_set` raises nothing: it answers False, or makes
    room by dropping pages. `usage` never shows more than the capacity; a page answered True is
    found right after its batch; every page is whole or missing, and missing ones can be set."""
    page_bytes, capacity_bytes = 64 << 10, 4 << 20
    namespace = bench.namespace(page_bytes)
    store = bench.open(capacity=capacity_bytes)
    expect_equal(store.usage().capacity_bytes, capacity_bytes, "capacity that usage reports")
    keys = bench.keys(4 * capacity_bytes // page_bytes)
    content: dict[str, bytes] = {}
    refused = 0
    for start in range(0, len(keys), 8):
        batch = keys[start : start + 8]
        pages = bench.pages(8, page_bytes)
        try:
            stored = store.batch_set(namespace, batch, pages)
        except CapacityExceeded as error:
            expect(False, f"batch_set raised instead of answering False: {error}")
            raise
        content.update(zip(batch, pages, strict=True))
        buffers = buffers_for(namespace, 8)
        hits = store.batch_get(namespace, batch, buffers)
        lost = sum(done and not hit for done, hit in zip(stored, hits, strict=True))
        expect(lost == 0, f"{lost} of 8 pages answered True are missing right after their batch")
        refused += stored.count(False)
        used = store.usage().stored_bytes
        expect(used <= capacity_bytes, f"usage shows {used} bytes of {capacity_bytes}")
    found = 0
    for key in keys:
        buffer = bytearray(page_bytes)
        if store.batch_get(namespace, [key], [buffer])[0]:
            expect(buffer == content[key], "a full store gave a page with other bytes")
            found += 1
    expect(found > 0, "a full store holds no page at all")
    missing = len(keys) - found
    expect(missing > 0, f"all pages are there, {len(keys) * page_bytes} bytes: no capacity is kept")
