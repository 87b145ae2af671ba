"""Host slots are the only buffer between a device pool and a store."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from pools.pool_cases import (
    MHA,
    MLA,
    Case,
    cases,
    device_pool,
    fill,
    fill_random,
    page_bytes,
    poison,
    slots,
)

from hicache_storage import PageSpans, PairedStore, Store, hookimpl, open_store
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.paired import PairedPools

Hashes = Callable[[int], list[str]]


class AddressBackend(MemoryBackend):
    """memory:// that remembers where the payload spans of each page lay."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig())
        self.seen: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def _note(self, hook: str, keys: list[str], pages: list[PageSpans]) -> None:
        for key, page in zip(keys, pages, strict=True):
            if "/n:" not in key:
                self.seen[hook, key.partition("/")[2]] = [where(span) for span in page[1:]]

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        self._note("set", keys, pages)
        return [self._set(key, b"".join(page)) for key, page in zip(keys, pages, strict=True)]

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        self._note("get", keys, buffers)
        return [self._get(key, spans) for key, spans in zip(keys, buffers, strict=True)]


def where(span: memoryview) -> tuple[int, int]:
    return ctypes.addressof(ctypes.c_char.from_buffer(span)), len(span)


def pools_of(target: PageGeometry, draft: PageGeometry | None, layout: Layout) -> PairedPools:
    pools = PairedPools(device_pool(target, 6), host_pages=6, layout=layout)
    fill_random(pools.device, 1)
    if draft is not None:
        pools.register_draft(device_pool(draft, 6))
        assert pools.draft_device is not None
        fill_random(pools.draft_device, 2)
    return pools


def paired_store(store: Store, pools: PairedPools, **options: Any) -> PairedStore:
    target, draft = pools.namespaces(model="m", draft_model="d", **options)
    return PairedStore(store, target, draft)


def expected_slots(host: HostPool, slot: int) -> list[tuple[int, int]]:
    """Where the page lies by the host pool's own tensors, not by its spans."""
    base = host.parts[0].data_ptr()
    return [(base + piece.start + slot * piece.length, piece.length) for piece in host.pieces]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draft", [None, MLA, replace(MHA, layers=1)], ids=["none", "mla", "mha"])
def test_storage_reads_and_writes_the_host_slots_themselves(
    hashes: Hashes, layout: Layout, draft: PageGeometry | None
) -> None:
    backend, pages = AddressBackend(), hashes(2)
    pools = pools_of(MHA, draft, layout)
    pairs = paired_store(Store(backend), pools)
    out, back = slots([4, 1]), slots([0, 5])
    pools.backup(slots([2, 3]), out).wait()
    assert pairs.batch_set(pages, pools.target_spans(out), pools.draft_spans(out)).target == [
        True,
        True,
    ]
    result = pairs.batch_get(pages, pools.target_spans(back), pools.draft_spans(back))
    assert result.usable_pages == 2
    assert result.draft == (None if draft is None else [True, True])
    halves = [(pools.host, "")] + ([(pools.draft_host, "d:")] if pools.draft_host else [])
    for host, tag in halves:
        assert host is not None
        for number, page_hash in enumerate(pages):
            for hook, moved in (("set", out), ("get", back)):
                seen = backend.seen[hook, tag + page_hash]
                assert seen == expected_slots(host, int(moved[number]))
    if draft is None:
        assert not [key for _, key in backend.seen if key.startswith("d:")]


@settings(max_examples=60)
@given(cases())
def test_pages_go_through_storage_and_come_back_exactly(case: Case) -> None:
    pools = PairedPools(
        device_pool(case.target, case.device_pages), host_pages=case.host_pages, layout=case.layout
    )
    halves = [(pools.device, pools.host)]
    fill_random(pools.device, 1)
    if case.draft is not None:
        pools.register_draft(device_pool(case.draft, case.device_pages))
        assert pools.draft_device is not None
        assert pools.draft_host is not None
        fill_random(pools.draft_device, 2)
        halves.append((pools.draft_device, pools.draft_host))
    expected = [
        [page_bytes(device, page, host.order) for page in case.source] for device, host in halves
    ]
    hashes = [f"{number:064x}" for number in case.source]
    out, back = slots(case.host), slots(case.host[::-1])
    with open_store("memory://") as store:
        pairs = paired_store(store, pools)
        pools.backup(slots(case.source), out).wait()
        stored = pairs.batch_set(hashes, pools.target_spans(out), pools.draft_spans(out))
        assert all(stored.target)
        for device, host in halves:
            poison(host)
            fill(device, 0xCD)
        result = pairs.batch_get(hashes, pools.target_spans(back), pools.draft_spans(back))
        assert result.usable_pages == len(hashes)
        assert result.usable_drafts == (len(hashes) if case.draft is not None else 0)
    pools.load_back(back, slots(case.destination)).synchronize()
    for (device, host), pages in zip(halves, expected, strict=True):
        found = [page_bytes(device, page, host.order) for page in case.destination]
        assert found == pages


@pytest.mark.parametrize("writer", LAYOUTS)
@pytest.mark.parametrize("reader", LAYOUTS)
def test_a_page_is_read_in_another_layout_of_the_same_order_and_missed_in_one_of_another(
    hashes: Hashes, writer: Layout, reader: Layout
) -> None:
    with open_store("memory://") as store:
        wrote = pools_of(MHA, MLA, writer)
        slot = slots([1])
        wrote.backup(slots([2]), slot).wait()
        paired_store(store, wrote).batch_set(
            hashes(1), wrote.target_spans(slot), wrote.draft_spans(slot)
        )
        reads = pools_of(MHA, MLA, reader)
        poison(reads.host)
        back = slots([3])
        pairs = paired_store(store, reads)
        result = pairs.batch_get(hashes(1), reads.target_spans(back), reads.draft_spans(back))
        same = (writer == "page_first") is (reader == "page_first")
        assert result.target == result.draft == [same]
        assert pairs.exists(hashes(1)).usable == same
        if same:
            reads.load_back(back, slots([0])).synchronize()
            assert page_bytes(reads.device, 0, "layer_token") == page_bytes(
                wrote.device, 2, "layer_token"
            )


@pytest.mark.parametrize(
    "other",
    [
        replace(MHA, head_dim=16, v_head_dim=16, dtype=torch.float8_e4m3fn),
        replace(MHA, dtype=torch.float16),
        replace(MHA, layers=4, heads=1),
        replace(MHA, heads=4, head_dim=4, v_head_dim=4),
        replace(MHA, first_layer=2),
        replace(MHA, head_dim=9, v_head_dim=7),
        replace(MHA, page_size=8, layers=1),
        PageGeometry("mla", 2, 1, 32, 0, 4, torch.bfloat16),
    ],
    ids=str,
)
def test_pages_of_equal_size_and_another_geometry_are_a_miss(
    hashes: Hashes, other: PageGeometry
) -> None:
    assert other.page_bytes == MHA.page_bytes
    with open_store("memory://") as store:
        wrote, reads = pools_of(MHA, None, "page_first"), pools_of(other, None, "page_first")
        slot = slots([0])
        wrote.backup(slots([1]), slot).wait()
        paired_store(store, wrote).batch_set(hashes(1), wrote.target_spans(slot))
        pairs = paired_store(store, reads)
        poison(reads.host)
        before = [bytes(span) for span in reads.target_spans(slot)[0]]
        assert pairs.batch_get(hashes(1), reads.target_spans(slot)).target == [False]
        assert [bytes(span) for span in reads.target_spans(slot)[0]] == before


@pytest.mark.parametrize("layers", [2, 4])
def test_a_draft_page_is_missed_by_a_pool_of_more_layers_and_zeroed(
    hashes: Hashes, layers: int
) -> None:
    with open_store("memory://") as store:
        wrote = pools_of(MHA, replace(MHA, layers=1), "page_first")
        reads = pools_of(MHA, replace(MHA, layers=layers), "page_first")
        slot = slots([0])
        wrote.backup(slots([1]), slot).wait()
        paired_store(store, wrote).batch_set(
            hashes(1), wrote.target_spans(slot), wrote.draft_spans(slot)
        )
        assert reads.draft_host is not None
        poison(reads.draft_host)
        result = paired_store(store, reads).batch_get(
            hashes(1), reads.target_spans(slot), reads.draft_spans(slot)
        )
        assert (result.target, result.draft) == ([True], [False])
        draft_spans = reads.draft_spans(slot)
        assert draft_spans is not None
        assert set(b"".join(draft_spans[0])) == {0}
