"""Section 1, answers; section 3, the leading run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from operator import is_
from typing import Any

from ...hookspecs import hookimpl
from ..bench import Bench, buffers_for
from ..clause import clause, expect, expect_equal


class _CallCounter:
    """A wrapper that counts the calls that reach the backend."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @hookimpl(wrapper=True)
    def batch_set(self) -> Generator[None, list[bool], list[bool]]:
        self.calls["batch_set"] += 1
        return (yield)

    @hookimpl(wrapper=True)
    def batch_get(self) -> Generator[None, list[bool], list[bool]]:
        self.calls["batch_get"] += 1
        return (yield)

    @hookimpl(wrapper=True)
    def exists(self) -> Generator[None, int, int]:
        self.calls["exists"] += 1
        return (yield)

    @hookimpl(wrapper=True)
    def delete(self) -> Generator[None, list[bool], list[bool]]:
        self.calls["delete"] += 1
        return (yield)


@clause("1.1", "A batch is answered with one bool a key, in the order of keys")
def order_and_length(bench: Bench) -> None:
    """`batch_set` and `batch_get` return a list of bools, as long as `keys`; answer i belongs to
    key i, whatever order the work was done in. Each page goes to and comes from its own spans."""
    namespace = bench.namespace()
    keys, pages = bench.keys(40), bench.pages(40)
    stored = bench.store.batch_set(namespace, keys, pages)
    expect_equal(stored, [True] * 40, "batch_set of 40 new pages")
    shuffled = list(range(40))
    bench.random.shuffle(shuffled)
    missing = bench.keys(10)
    asked = [keys[i] for i in shuffled]
    for place, key in zip((0, 3, 4, 11, 20, 21, 22, 35, 40, 49), missing, strict=True):
        asked.insert(place, key)
    buffers = buffers_for(namespace, len(asked))
    hits = bench.store.batch_get(namespace, asked, buffers)
    expect_equal(hits, [key not in missing for key in asked], "batch_get, 10 of 50 not stored")
    content = dict(zip(keys, pages, strict=True))
    for i, key in enumerate(asked):
        if hits[i]:
            expect(buffers[i] == content[key], f"batch_get put another page into buffers[{i}]")


@clause("1.2", "An empty batch asks the backend for nothing")
def empty_batch(bench: Bench) -> None:
    """Without keys, the answer is an empty list or 0 and no hook is called."""
    counter = _CallCounter()
    store = bench.open(wrappers=[counter])
    namespace = bench.namespace()
    expect_equal(store.batch_set(namespace, [], []), [], "batch_set without keys")
    expect_equal(store.batch_get(namespace, [], []), [], "batch_get without keys")
    expect_equal(store.exists(namespace, []), 0, "exists without keys")
    if "delete" in store.capabilities:
        expect_equal(store.delete(namespace, []), [], "delete without keys")
    expect(not counter.calls, f"an empty batch reached the backend: {dict(counter.calls)}")


@clause("1.3", "A miss does not spoil its neighbours")
def neighbours_of_a_miss(bench: Bench) -> None:
    """A page that isn't there is False at its own place: the others of the batch are found and
    correct, whether it stands first, last or between them. A batch of misses alone raises
    nothing."""
    namespace = bench.namespace()
    keys, pages = bench.keys(8), bench.pages(8)
    bench.store.batch_set(namespace, keys, pages)
    for place in (0, 4, 8):
        asked = [*keys[:place], *bench.keys(1), *keys[place:]]
        buffers = buffers_for(namespace, 9)
        hits = bench.store.batch_get(namespace, asked, buffers)
        expect_equal(hits, [i != place for i in range(9)], f"batch_get with a miss at {place}")
        found = [bytes(buffer) for i, buffer in enumerate(buffers) if i != place]
        expect(found == pages, f"a miss at {place} changed the content of other pages")
    hits = bench.store.batch_get(namespace, bench.keys(3), buffers_for(namespace, 3))
    expect_equal(hits, [False] * 3, "batch_get of three pages that were never stored")


@clause("1.4", "A batch answers as its keys would one by one, whatever its length")
def batch_and_single(bench: Bench) -> None:
    """Batches of 1, 2, 128, 129 and 300 keys, every seventh page missing, give the answers and the
    bytes that calls with one key give."""
    namespace = bench.namespace(96)
    for length in (1, 2, 128, 129, 300):
        keys, pages = bench.keys(length), bench.pages(length, 96)
        there = [i for i in range(length) if i % 7 != 5]
        some_keys, some_pages = [keys[i] for i in there], [pages[i] for i in there]
        stored = bench.store.batch_set(namespace, some_keys, some_pages)
        expect_equal(stored, [True] * len(there), f"batch_set of {len(there)} pages")
        buffers = buffers_for(namespace, length)
        hits = bench.store.batch_get(namespace, keys, buffers)
        expect_equal(hits, [i % 7 != 5 for i in range(length)], f"batch_get of {length} keys")
        expect(all(buffers[i] == pages[i] for i in there), f"wrong bytes in a batch of {length}")
        run = bench.store.exists(namespace, keys)
        expect_equal(run, min(length, 5), f"exists of {length} keys, the one at 5 missing")
        for i in {0, length // 2, length - 1}:
            single = bytearray(96)
            hit = bench.store.batch_get(namespace, [keys[i]], [single])
            expect_equal(hit, [hits[i]], f"batch_get of key {i} alone, against {length} at once")
            expect(not hits[i] or single == pages[i], f"key {i} alone gives other bytes")
            found = bench.store.exists(namespace, [keys[i]])
            expect_equal(found, int(hits[i]), f"exists of key {i} alone")


@clause("1.5", "A key may stand in a batch more than once")
def duplicate_keys(bench: Bench) -> None:
    """Equal keys in one `batch_get` are each answered and each buffer is filled. In one `batch_set`
    each is answered, and the page is then one of those given for it, whole."""
    namespace = bench.namespace()
    first, second, third = bench.keys(3)
    pages = bench.pages(4)
    stored = bench.store.batch_set(namespace, [first, second, first], pages[:3])
    expect_equal(stored, [True] * 3, "batch_set with a key twice")
    asked = [first, third, first, second, first]
    buffers = buffers_for(namespace, 5)
    hits = bench.store.batch_get(namespace, asked, buffers)
    expect_equal(hits, [True, False, True, True, True], "batch_get with a key three times")
    either = (pages[0], pages[2])
    expect(bytes(buffers[0]) in either, "a key set twice in a batch holds neither page")
    expect(buffers[0] == buffers[2] == buffers[4], "equal keys in one batch_get: different bytes")
    expect(buffers[3] == pages[1], "the page beside a key that was set twice has wrong bytes")
    run = bench.store.exists(namespace, [first, first, third, first])
    expect_equal(run, 2, "exists with the run 'stored, the same, missing'")


@clause("1.6", "prefix_keys never change an answer")
def prefix_keys(bench: Bench) -> None:
    """They tell a backend where to place a page. A page written with them is found without, and
    the other way round; with prefix pages that aren't stored, and with an empty prefix."""
    namespace = bench.namespace()
    keys, prefix = bench.keys(6), bench.keys(4)
    pages = bench.pages(6)
    ways: list[list[str] | None] = [prefix, None, []]
    for i, way in enumerate(ways):
        part = slice(2 * i, 2 * i + 2)
        stored = bench.store.batch_set(namespace, keys[part], pages[part], way)
        expect_equal(stored, [True] * 2, f"batch_set with prefix_keys {_named(way)}")
    for way in [*ways, keys[:3]]:
        buffers = buffers_for(namespace, 6)
        hits = bench.store.batch_get(namespace, keys, buffers, way)
        expect_equal(hits, [True] * 6, f"batch_get with prefix_keys {_named(way)}")
        expect([bytes(b) for b in buffers] == pages, f"other bytes with prefix_keys {_named(way)}")
        run = bench.store.exists(namespace, keys, way)
        expect_equal(run, 6, f"exists with prefix_keys {_named(way)}")


def _named(way: list[str] | None) -> str:
    return "None" if way is None else f"of {len(way)} pages"


@clause("1.7", "Answers are plain Python values")
def plain_values(bench: Bench) -> None:
    """`batch_set`, `batch_get` and `delete` give a list of bool, `exists` gives an int: not a
    tuple, an array, a NumPy scalar or None, which callers would have to guess about."""
    namespace = bench.namespace()
    keys = bench.keys(2)
    bench.store.batch_set(namespace, keys, bench.pages(2))
    # Store refuses anything else, so that these calls return shows it; named again for reports.
    caller = bench.raw()
    names = [f"{namespace.digest}/{key}" for key in keys]
    for asked in (names, [f"{namespace.digest}/{bench.keys(1)[0]}"]):
        expect(type(caller.exists(asked, None)) is int, "exists must give an int, also for none")
    buffers = [(memoryview(bytearray(64)), memoryview(bytearray(512))) for _ in keys]
    expect(type(caller.batch_get(names, list(buffers), None)) is list, "batch_get: not a list")
    if "delete" in bench.store.capabilities:
        expect(type(caller.delete(names)) is list, "delete must give a list")


@clause("1.8", "The lists that a call is given stay as they are")
def arguments_stay(bench: Bench) -> None:
    """A backend may sort or shorten copies of them. The caller goes on to use its own."""
    namespace = bench.namespace()
    in_order = sorted(bench.keys(5))
    keys = [in_order[i] for i in (1, 0, 2, 4, 3)]  # in neither order
    names = [f"{namespace.digest}/{key}" for key in keys]
    frames = [bench.framed(namespace, key, bench.page(512)) for key in keys]
    prefix = [f"{namespace.digest}/{key}" for key in bench.keys(2)]
    buffers = [(memoryview(bytearray(64)), memoryview(bytearray(512))) for _ in keys]
    calls: list[tuple[str, dict[str, list[Any]]]] = [
        ("batch_set", {"keys": names[:4], "pages": frames[:4], "prefix_keys": prefix}),
        ("batch_get", {"keys": names, "buffers": list(buffers), "prefix_keys": prefix}),
        ("exists", {"keys": names, "prefix_keys": prefix}),
    ]
    if "delete" in bench.store.capabilities:
        calls.append(("delete", {"keys": names}))
    for hook, arguments in calls:
        given = {name: list(value) for name, value in arguments.items()}
        getattr(bench.raw(), hook)(**given)
        for name, value in arguments.items():
            same = len(given[name]) == len(value) and all(map(is_, given[name], value))
            expect(same, f"{hook} changed the list `{name}` that it was given")


@clause("3.1", "Without its first page nothing of a run is found")
def hole_at_first_page(bench: Bench) -> None:
    """`exists` counts from `keys[0]`: if that page is missing the answer is 0, however many pages
    behind it are stored."""
    namespace = bench.namespace()
    keys = bench.keys(10)
    bench.store.batch_set(namespace, keys[1:], bench.pages(9))
    expect_equal(bench.store.exists(namespace, keys), 0, "exists, page 0 of 10 missing")
    expect_equal(bench.store.exists(namespace, keys[1:]), 9, "exists from page 1 on")


@clause("3.2", "A run ends at its first hole")
def hole_anywhere(bench: Bench) -> None:
    """With page k missing the answer is k, for every k, and n if no page is missing. `batch_get`
    agrees: exactly the missing page is a miss."""
    namespace = bench.namespace(64)
    for hole in (1, 2, 7, 15, None):
        keys, pages = bench.keys(16), bench.pages(16, 64)
        there = [i for i in range(16) if i != hole]
        bench.store.batch_set(namespace, [keys[i] for i in there], [pages[i] for i in there])
        run = bench.store.exists(namespace, keys)
        expect_equal(run, 16 if hole is None else hole, f"exists of 16 keys, hole at {hole}")
        hits = bench.store.batch_get(namespace, keys, buffers_for(namespace, 16))
        expect_equal(hits, [i != hole for i in range(16)], f"batch_get of 16 keys, hole at {hole}")


@clause("3.3", "exists and batch_get agree on one key at any moment")
def exists_agrees(bench: Bench) -> None:
    """What was just stored is found by both, what was never stored by neither; and a page that
    `exists` has seen missing is found once it is stored (no remembered misses)."""
    namespace = bench.namespace()
    key, page = bench.keys(1)[0], bench.page(512)
    for stored in (False, True):
        if stored:
            expect_equal(bench.store.batch_set(namespace, [key], [page]), [True], "batch_set")
        expect_equal(bench.store.exists(namespace, [key]), int(stored), f"exists, stored={stored}")
        buffer = bytearray(512)
        hits = bench.store.batch_get(namespace, [key], [buffer])
        expect_equal(hits, [stored], f"batch_get, stored={stored}")


@clause("3.4", "A run may go through two namespaces in turn")
def run_across_namespaces(bench: Bench) -> None:
    """Targets and drafts are looked up in one call, the target's and the draft's key of each page
    in turn: the answer counts keys, and ends at the first that is missing of either."""
    spaces = bench.namespace(64), bench.namespace(128)
    keys = bench.keys(6)
    for space, stored in zip(spaces, (keys, keys[:4]), strict=True):
        bench.store.batch_set(space, stored, bench.pages(len(stored), space.page_bytes))
    in_turn = [(space, key) for key in keys for space in spaces]
    expect_equal(bench.store.exists_across(in_turn), 9, "exists, the fifth draft missing")
    expect_equal(bench.store.exists_across(in_turn[:8]), 8, "exists, nothing missing")
    expect_equal(bench.store.exists_across(in_turn[9:]), 0, "exists from the missing draft on")
