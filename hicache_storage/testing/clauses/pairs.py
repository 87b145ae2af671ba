"""Section 11, pairs of target and draft pages."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import Any

from ...hookspecs import hookimpl
from ...keys import draft_key, split_stored_key
from ...namespace import Namespace
from ...pairing import PairedStore, Pairing
from ..bench import Bench, buffers_for
from ..clause import clause, expect, expect_equal

OLD = 0xAB


class _KeyLog:
    """A wrapper that notes (hook, keys) of each call, and may lose drafts."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    @hookimpl(wrapper=True)
    def batch_set(self, keys: list[str]) -> Generator[None, list[bool], list[bool]]:
        self.calls.append(("batch_set", list(keys)))
        return (yield)

    @hookimpl(wrapper=True)
    def batch_get(self, keys: list[str]) -> Generator[None, list[bool], list[bool]]:
        self.calls.append(("batch_get", list(keys)))
        return (yield)

    @hookimpl(wrapper=True)
    def exists(self, keys: list[str]) -> Generator[None, int, int]:
        self.calls.append(("exists", list(keys)))
        return (yield)


def _spaces(bench: Bench, draft_bytes: int = 300) -> tuple[Namespace, Namespace]:
    target = bench.namespace(1200, model="conformance-kit/target")
    return target, bench.namespace(draft_bytes, model="conformance-kit/draft")


def _hashes(bench: Bench, count: int) -> list[str]:
    hashes = bench.keys(count)
    bench.note_keys([draft_key(one) for one in hashes])
    return hashes


def _old(namespace: Namespace, count: int) -> list[bytearray]:
    """Buffers that still hold the bytes of an earlier use."""
    return [bytearray([OLD]) * namespace.page_bytes for _ in range(count)]


def _same(found: Sequence[Any], wanted: Sequence[bytes], what: str) -> None:
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        expect(bytes(a) == b, f"{what}: page {i} has wrong bytes")


@clause("11.1", "Target and draft go in and come out in pairs, the draft under d:")
def pairs_round_trip(bench: Bench) -> None:
    """Draft pages, here with another geometry and length, are stored under `d:<hash>` in their own
    namespace. Both halves come back, are looked up and are deleted together."""
    target, draft = _spaces(bench)
    pairs = PairedStore(bench.store, target, draft, pairing="required")
    hashes = _hashes(bench, 6)
    targets, drafts = bench.pages(6, 1200), bench.pages(6, 300)
    stored = pairs.batch_set(hashes, targets, drafts)
    expect_equal(stored.target, [True] * 6, "target half of batch_set")
    expect_equal(stored.draft, [True] * 6, "draft half of batch_set")
    under = [draft_key(one) for one in hashes]
    expect_equal(bench.store.exists(draft, under), 6, "draft pages under d:")
    expect_equal(bench.store.exists(draft, hashes), 0, "draft pages under the bare hash")
    expect_equal(bench.store.exists(target, under), 0, "draft pages in the target's namespace")
    target_buffers, draft_buffers = _old(target, 6), _old(draft, 6)
    found = pairs.batch_get(hashes, target_buffers, draft_buffers)
    expect_equal((found.target, found.draft), ([True] * 6, [True] * 6), "both halves of batch_get")
    _same(target_buffers, targets, "target half")
    _same(draft_buffers, drafts, "draft half")
    expect_equal(pairs.exists(hashes).usable, 6, "usable pages")
    if "delete" in bench.store.capabilities:
        pairs.delete(hashes)
        left = bench.store.exists(draft, under[:1]) + bench.store.exists(target, hashes[:1])
        expect_equal(left, 0, "halves left after deleting pairs")


@clause("11.2", "The draft is written first, the target last")
def draft_first(bench: Bench) -> None:
    """So a target that can be seen implies that its draft was tried before."""
    log = _KeyLog()
    target, draft = _spaces(bench)
    pairs = PairedStore(bench.open(wrappers=[log]), target, draft)
    hashes = _hashes(bench, 3)
    pairs.batch_set(hashes, bench.pages(3, 1200), bench.pages(3, 300))
    order = []
    for hook, keys in log.calls:
        tags = {split_stored_key(key)[1].partition(":")[0] for key in keys if ":" in key}
        if hook == "batch_set" and "n" not in tags:
            order.append("draft" if "d" in tags else "target")
    in_turn = [half for half, _ in itertools.groupby(order)]  # a batch may be several calls
    expect_equal(in_turn, ["draft", "target"], "order of the two writes")


@clause("11.3", "With best effort a lost draft is zeroed and reported, and costs no target hit")
def best_effort(bench: Bench) -> None:
    """No draft at all, the first, one between, the last missing, or one damaged: the target's hits
    stay, the draft's list says which are missing, and their buffers hold zeros instead of the
    bytes of an earlier use."""
    target, draft = _spaces(bench)
    pairs = PairedStore(bench.store, target, draft, pairing="best_effort")
    for lost in ([0, 1, 2, 3, 4], [0], [2], [4], [1, 3]):
        hashes = _hashes(bench, 5)
        targets, drafts = bench.pages(5, 1200), bench.pages(5, 300)
        kept = [i for i in range(5) if i not in lost]
        bench.store.batch_set(target, hashes, targets)
        kept_drafts = [drafts[i] for i in kept]
        bench.store.batch_set(draft, [draft_key(hashes[i]) for i in kept], kept_drafts)
        if lost == [2]:
            name = draft_key(hashes[2])
            damaged = bytearray(b"".join(bench.framed(draft, name, drafts[2])))
            damaged[200] ^= 1
            bench.tamper(draft, name, bytes(damaged))
        target_buffers, draft_buffers = _old(target, 5), _old(draft, 5)
        found = pairs.batch_get(hashes, target_buffers, draft_buffers)
        expect_equal(found.target, [True] * 5, f"target hits, drafts {lost} lost")
        expect_equal(found.draft, [i in kept for i in range(5)], f"draft hits, drafts {lost} lost")
        expect_equal(found.usable_pages, 5, f"usable pages, drafts {lost} lost")
        _same(target_buffers, targets, f"targets, drafts {lost} lost")
        wanted = [drafts[i] if i in kept else bytes(300) for i in range(5)]
        _same(draft_buffers, wanted, f"drafts, {lost} lost")
        expect_equal(pairs.exists(hashes).usable, 5, f"usable pages of exists, {lost} lost")


@clause("11.4", "With required pairs the usable run is the shorter of the two")
def required(bench: Bench) -> None:
    """A hole in either half ends it, at the first page, between and at the last; `exists` and
    `batch_get` agree."""
    target, draft = _spaces(bench)
    pairs = PairedStore(bench.store, target, draft, pairing="required")
    for lost_target, lost_draft in ((None, 0), (None, 3), (2, None), (2, 4), (4, 2), (0, 0)):
        hashes = _hashes(bench, 5)
        for namespace, lost, keys in (
            (target, lost_target, hashes),
            (draft, lost_draft, [draft_key(one) for one in hashes]),
        ):
            kept = [key for i, key in enumerate(keys) if i != lost]
            bench.store.batch_set(namespace, kept, bench.pages(len(kept), namespace.page_bytes))
        shorter = min(5 if lost is None else lost for lost in (lost_target, lost_draft))
        case = f"target {lost_target} and draft {lost_draft} lost"
        found = pairs.batch_get(hashes, buffers_for(target, 5), buffers_for(draft, 5))
        expect_equal(found.usable_pages, shorter, f"usable pages, {case}")
        expect_equal(pairs.exists(hashes).usable, shorter, f"usable pages of exists, {case}")


@clause("11.5", "An orphan draft is never taken for a target")
def orphan_draft(bench: Bench) -> None:
    """A draft whose target is missing is no hit under either policy, also where both pools have
    the same geometry."""
    for draft_bytes in (300, 1200):
        target, draft = _spaces(bench, draft_bytes)
        hashes = _hashes(bench, 3)
        drafts = [draft_key(one) for one in hashes]
        bench.store.batch_set(draft, drafts, bench.pages(3, draft_bytes))
        pairings: tuple[Pairing, ...] = ("best_effort", "required")
        for pairing in pairings:
            pairs = PairedStore(bench.store, target, draft, pairing=pairing)
            found = pairs.batch_get(hashes, buffers_for(target, 3), buffers_for(draft, 3))
            expect_equal(found.target, [False] * 3, f"target hits of orphan drafts, {pairing}")
            expect_equal(found.usable_pages, 0, f"usable pages of orphan drafts, {pairing}")
            expect_equal(pairs.exists(hashes).usable, 0, f"exists of orphan drafts, {pairing}")


@clause("11.6", "A draft of another geometry is a miss")
def other_draft_geometry(bench: Bench) -> None:
    """Drafts that another draft model wrote under the same hashes aren't read: neither of other
    length nor of equal length and other meaning. The targets are."""
    target, draft = _spaces(bench)
    hashes = _hashes(bench, 4)
    PairedStore(bench.store, target, draft).batch_set(
        hashes, bench.pages(4, 1200), bench.pages(4, 300)
    )
    for other in (
        bench.namespace(200, model="conformance-kit/draft"),
        bench.namespace(300, model="conformance-kit/draft", dtype="float8_e5m2"),
        bench.namespace(300, model="conformance-kit/draft", revision="2"),
    ):
        pairs = PairedStore(bench.store, target, other)
        buffers = _old(other, 4)
        found = pairs.batch_get(hashes, buffers_for(target, 4), buffers)
        expect_equal(found.target, [True] * 4, "target hits with another draft model")
        expect_equal(found.draft, [False] * 4, "draft hits with another draft model")
        _same(buffers, [bytes(other.page_bytes)] * 4, "zeroed drafts of another model")


@clause("11.7", "Without a draft pool no draft request is made")
def draft_off(bench: Bench) -> None:
    """Setting, looking up and reading targets alone asks the backend for no `d:` key, and the
    result says "no draft" rather than "lost"."""
    log = _KeyLog()
    target, _ = _spaces(bench)
    pairs = PairedStore(bench.open(wrappers=[log]), target)
    hashes = _hashes(bench, 4)
    stored = pairs.batch_set(hashes, bench.pages(4, 1200))
    found = pairs.batch_get(hashes, buffers_for(target, 4))
    count = pairs.exists(hashes)
    expect_equal((stored.draft, found.draft, count.draft), (None, None, None), "draft results")
    expect_equal((found.usable_pages, count.usable), (4, 4), "usable pages")
    asked = [key for _, keys in log.calls for key in keys if "/d:" in key]
    expect(not asked, f"draft keys were asked for: {asked[:2]}")
