"""Section 6, keys and namespaces; section 7, threads and processes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable

from ...keys import stored_key
from ...namespace import Namespace
from ..bench import Bench, buffers_for
from ..clause import ClauseFailed, clause, expect, expect_equal
from ..worker import read_whole


@clause("6.1", "Every allowed key is a key of its own")
def all_key_forms(bench: Bench) -> None:
    """16 to 128 hex digits, without a tag, with `d:` and with tags up to 32 characters. Keys that
    differ in the tag alone, or of which one is the beginning of another, hold pages of their
    own."""
    namespace = bench.namespace()
    digits = hashlib.sha512(bench.salt.encode()).hexdigest()
    hashes = [digits[:length] for length in (16, 17, 32, 40, 63, 64, 65, 127, 128)]
    tags = ["", "d:", "x:", "dd:", "d_0:", "kv_draft_layer_07:", "a" * 32 + ":"]
    keys = [tag + name for tag in tags for name in hashes]
    bench.note_keys(keys)
    pages = bench.pages(len(keys))
    stored = bench.store.batch_set(namespace, keys, pages)
    expect_equal(stored, [True] * len(keys), "batch_set of every form of key")
    buffers = buffers_for(namespace, len(keys))
    hits = bench.store.batch_get(namespace, keys, buffers)
    expect_equal(hits, [True] * len(keys), "batch_get of every form of key")
    for key, page, buffer in zip(keys, pages, buffers, strict=True):
        expect(buffer == page, f"key {key[:40]}... holds the page of another key")
    expect_equal(bench.store.exists(namespace, keys), len(keys), "exists of every form of key")
    if "delete" in bench.store.capabilities:
        bench.store.delete(namespace, [keys[0]])
        expect_equal(bench.store.exists(namespace, [keys[0]]), 0, "exists of a deleted key")
        run = bench.store.exists(namespace, keys[1:])
        expect_equal(run, len(keys) - 1, "exists of the others after one key was deleted")


@clause("6.2", "Namespaces do not meet")
def namespaces_apart(bench: Bench) -> None:
    """Equal keys in namespaces that differ in one field (model, tenant, dtype, page size, rank,
    order, ...) hold pages of their own, for every verb."""
    names = _similar_namespaces(bench)
    keys = bench.keys(3)
    pages = {namespace: bench.pages(3) for namespace in names}
    first = names[0]
    bench.store.batch_set(first, keys, pages[first])
    for namespace in names[1:]:
        run = bench.store.exists(namespace, keys)
        expect_equal(run, 0, f"exists, {_differs(first, namespace)}")
        hits = bench.store.batch_get(namespace, keys, buffers_for(namespace, 3))
        expect_equal(hits, [False] * 3, f"batch_get, {_differs(first, namespace)}")
    for namespace in names[1:]:
        stored = bench.store.batch_set(namespace, keys, pages[namespace])
        expect_equal(stored, [True] * 3, f"batch_set, {_differs(first, namespace)}")
    for namespace in names:
        buffers = buffers_for(namespace, 3)
        hits = bench.store.batch_get(namespace, keys, buffers)
        expect_equal(hits, [True] * 3, "batch_get of each namespace's own pages")
        found = [bytes(buffer) for buffer in buffers]
        expect(found == pages[namespace], f"other bytes, {_differs(first, namespace)}")
    if "delete" in bench.store.capabilities:
        bench.store.delete(first, keys)
        expect_equal(bench.store.exists(first, keys), 0, "exists after delete")
        for namespace in names[1:]:
            run = bench.store.exists(namespace, keys)
            expect_equal(run, 3, f"exists after delete elsewhere, {_differs(first, namespace)}")


def _similar_namespaces(bench: Bench) -> list[Namespace]:
    changes: list[dict[str, object]] = [
        {},
        {"model": "conformance-kit/b"},
        {"model": "conformance-kit-b"},
        {"revision": "2"},
        {"dtype": "float8_e4m3fn"},
        {"dtype": "float8_e5m2"},
        {"page_size": 2},
        {"layers": 2},
        {"first_layer": 1},
        {"order": "layer_token"},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"pp_size": 2, "pp_rank": 1},
        {"cp_size": 2, "cp_rank": 1},
        {"tenant": bench.salt + "/b"},
    ]
    return [bench.namespace(512, **change) for change in changes]


def _differs(a: Namespace, b: Namespace) -> str:
    return "namespaces differing in " + ("; ".join(a.differences(b)) or "nothing")


@clause("6.3", "The whole stored key names a page")
def whole_stored_key(bench: Bench) -> None:
    """A backend that drops or shortens a part of the key it is given (the namespace, the tag, the
    end of the hash) mixes up pages. The header check would turn that into misses; this clause
    looks at the backend's own answers."""
    digest = hashlib.sha256(bench.salt.encode()).hexdigest()
    spaces = [bench.namespace(512, tenant=f"{bench.salt}{i}") for i in range(3)]
    hashes = [digest, digest[:-1] + ("0" if digest[-1] != "0" else "1"), digest[:63]]
    keys = [tag + name for tag in ("", "d:") for name in hashes]
    bench.note_keys(keys)
    entries = [(space, key, bench.page(512)) for space in spaces for key in keys]
    names = [stored_key(space.digest, key) for space, key, _ in entries]
    frames = [bench.framed(space, key, page) for space, key, page in entries]
    stored = bench.raw().batch_set(names, frames, None)
    expect_equal(stored, [True] * len(names), "batch_set of similar stored keys")
    for name, frame, (space, key, _) in zip(names, frames, entries, strict=True):
        found = bench.stored(space, key)
        expect(found == b"".join(frame), f"stored key {name} does not hold its own page")


# -- threads and processes -----------------------------------------------------------------------


def _run_threads(jobs: list[Callable[[], None]], timeout_s: float = 60.0) -> None:
    """Runs the jobs at once; raises the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def guarded(job: Callable[[], None]) -> None:
        try:
            start.wait(timeout_s)
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise ClauseFailed(f"a thread at work on the store did not end within {timeout_s} s")
    if errors:
        raise errors[0]


@clause("7.1", "Threads use one store at once, each getting its own answers")
def threads_with_own_pages(bench: Bench) -> None:
    """Eight threads set, look up, read and read past the end of their own pages through one store
    object, none of which was made in their thread."""
    namespace = bench.namespace(2048)
    store = bench.store
    work = [(bench.keys(32), bench.pages(32, 2048), bench.keys(2)) for _ in range(8)]

    def use(keys: list[str], pages: list[bytes], missing: list[str]) -> None:
        for start in range(0, 32, 8):
            part = slice(start, start + 8)
            expect_equal(store.batch_set(namespace, keys[part], pages[part]), [True] * 8, "set")
            expect_equal(store.exists(namespace, keys[: start + 8]), start + 8, "exists")
        for _ in range(3):
            buffers = buffers_for(namespace, 34)
            hits = store.batch_get(namespace, [*keys, *missing], buffers)
            expect_equal(hits, [True] * 32 + [False] * 2, "batch_get in a thread")
            expect([bytes(b) for b in buffers[:32]] == pages, "a thread read another's page")

    _run_threads([lambda one=one: use(*one) for one in work])  # type: ignore[misc]


@clause("7.2", "Threads reading a page while it is rewritten see one whole page")
def threads_rewriting(bench: Bench) -> None:
    """Two threads rewrite the same pages, each time with all bytes changed, while two others read.
    What the backend hands out is the old page or the new one, never parts of both."""
    namespace = bench.namespace(1 << 20)
    store, keys = bench.store, bench.keys(2)
    fills = [bytes([fill]) * (1 << 20) for fill in (0x00, 0xFF)]
    store.batch_set(namespace, keys, [fills[0]] * 2)
    until_s = time.monotonic() + 1.5
    seen = {"hits": 0, "mixtures": 0}

    def write(offset: int) -> None:
        turn = offset
        while time.monotonic() < until_s:
            store.batch_set(namespace, keys, [fills[turn % 2]] * 2)
            turn += 1

    def read() -> None:
        while time.monotonic() < until_s:
            for key in keys:
                whole = read_whole(store, namespace, key)
                seen["hits"] += whole is not None
                seen["mixtures"] += whole is False

    _run_threads([lambda: write(0), lambda: write(1), read, read])
    expect(seen["hits"] > 0, "no read found the page while it was being rewritten")
    expect(
        seen["mixtures"] == 0,
        f"{seen['mixtures']} of {seen['hits']} reads got parts of two pages",
    )


@clause("7.3", "Processes reading while another rewrites see whole pages", needs=["shared"])
def processes_rewriting(bench: Bench) -> None:
    """Two processes read pages that a third rewrites, each time with all bytes changed. What they
    get is the old page or the new one, or a miss, never parts of both."""
    namespace = bench.namespace(1 << 20)
    keys = bench.keys(2)
    common = {"namespace": namespace.canonical, "keys": keys}
    writer = bench.spawn("rewrite_until_stopped", **common)
    writer.answer()
    readers = [bench.spawn("read_until_stopped", **common) for _ in range(2)]
    for reader in readers:
        reader.answer()
    time.sleep(1.0)
    counts = [reader.stop() for reader in readers]
    rounds = writer.stop()["rounds"]
    hits = sum(count["hits"] for count in counts)
    mixtures = sum(count["mixtures"] for count in counts)
    expect(rounds > 1, "the writing process did not rewrite the pages even twice")
    expect(hits > 0, "no read in another process found the pages")
    expect(mixtures == 0, f"{mixtures} of {hits} reads in other processes got parts of two pages")
    # The store works on, with those processes gone.
    page = bench.page(1 << 20)
    expect_equal(bench.store.batch_set(namespace, keys[:1], [page]), [True], "batch_set after them")
    buffer = bytearray(1 << 20)
    expect_equal(bench.store.batch_get(namespace, keys[:1], [buffer]), [True], "batch_get after it")
    expect(buffer == page, "the last page set is not the one read")


@clause("7.4", "What one process stored another finds", needs=["shared"])
def processes_share(bench: Bench) -> None:
    """While both have the store open: pages set here are read there, and the other way round, also
    those looked for in vain before."""
    namespace = bench.namespace(4096)
    mine, theirs = bench.keys(5), bench.keys(5)
    store = bench.store
    expect_equal(store.exists(namespace, theirs), 0, "exists before another process has stored")
    pages = [bench.page(4096) for _ in mine]
    store.batch_set(namespace, mine, pages)
    common = {"namespace": namespace.canonical, "first_seed": 7}
    written = bench.spawn("write_pages", keys=theirs, **common).answer()
    expect_equal(written["stored"], [True] * 5, "batch_set in another process")
    expect_equal(store.exists(namespace, theirs), 5, "exists after another process has stored")
    read = bench.spawn("read_pages", keys=[*theirs, *mine], **common).answer()
    expect_equal(read["hits"], [True] * 10, "batch_get in a third process")
    expect_equal(read["right"][:5], [True] * 5, "right bytes in a third process")
    buffers = buffers_for(namespace, 5)
    expect_equal(store.batch_get(namespace, mine, buffers), [True] * 5, "batch_get of own pages")
    expect([bytes(b) for b in buffers] == pages, "another process changed pages it did not set")


@clause("7.5", "After a fork both processes go on")
def fork_and_go_on(bench: Bench) -> None:
    """A store opened and used before a fork is used in the child, closed there, and used on in the
    parent; and a child that never touches it does no harm either. Neither hangs."""
    namespace = bench.namespace(1024)
    for child_uses in (False, True):
        worker = bench.spawn(
            "fork_and_use",
            namespace=namespace.canonical,
            keys=bench.keys(8),
            child_uses=child_uses,
        )
        worker.answer()
