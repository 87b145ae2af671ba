"""Backup and load-back: exact bytes in the named slots, and in no other."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from pools.pool_cases import (
    DTYPES,
    MHA,
    MLA,
    POISON,
    Case,
    cases,
    device_pool,
    fill,
    fill_random,
    host_page,
    page_bytes,
    poison,
    rows,
    slots,
    strided_pool,
)

from hicache_storage import ConfigError, PageSizeMismatch
from hicache_storage.pools.device import DevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.transfer import Ends, backup, load_back


def pair(geometry: PageGeometry, layout: Layout = "page_first", pages: int = 4) -> Any:
    """A device pool of random bytes, and a poisoned host pool."""
    device, host = device_pool(geometry, pages), HostPool(geometry, pages, layout)
    fill_random(device, 1)
    poison(host)
    return device, host


def host_pages(host: HostPool) -> list[bytes]:
    return [host_page(host, page) for page in range(host.num_pages)]


@settings(max_examples=200)
@given(cases())
def test_a_page_comes_back_exactly_and_no_other_slot_is_touched(case: Case) -> None:
    make = strided_pool if case.strided else device_pool
    geometries = [case.target] + ([case.draft] if case.draft is not None else [])
    pools: list[tuple[DevicePool, HostPool]] = []
    for seed, geometry in enumerate(geometries):
        device = make(geometry, case.device_pages)
        host = HostPool(geometry, case.host_pages, case.layout)
        fill_random(device, seed)
        poison(host)
        pools.append((device, host))
    draft = pools[1] if case.draft is not None else None
    before = [rows(device) for device, _ in pools]
    pages = [
        [page_bytes(device, page, host.order) for page in case.source] for device, host in pools
    ]

    device, host = pools[0]
    moved = backup(device, host, slots(case.source), slots(case.host), draft=draft)
    moved.wait()
    assert moved.done()
    assert [rows(device) for device, _ in pools] == before, "a backup changes no device page"
    for (_, host), expected in zip(pools, pages, strict=True):
        untouched = [bytes([POISON]) * host.geometry.page_bytes] * host.num_pages
        for slot, page in zip(case.host, expected, strict=True):
            untouched[slot] = page
        assert host_pages(host) == untouched

    for device, _ in pools:
        fill(device, POISON)
    kept = [host_pages(host) for _, host in pools]
    device, host = pools[0]
    loading = load_back(host, device, slots(case.host), slots(case.destination), draft=draft)
    loading.synchronize()
    assert loading.done()
    assert [host_pages(host) for _, host in pools] == kept, "a load-back changes no host page"
    for (device, host), expected in zip(pools, pages, strict=True):
        untouched = [bytes([POISON]) * host.geometry.page_bytes] * device.num_pages
        for slot, page in zip(case.destination, expected, strict=True):
            untouched[slot] = page
        found = [page_bytes(device, page, host.order) for page in range(device.num_pages)]
        assert found == untouched


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row_bytes", [1, 3, 576, 656])
@pytest.mark.parametrize("count", [0, 1, 257])
@pytest.mark.parametrize("page_size", [1, 4])
def test_any_row_size_and_any_count_is_exact(
    layout: Layout, row_bytes: int, count: int, page_size: int
) -> None:
    geometry = PageGeometry("mla", 2, 1, row_bytes, 0, page_size, torch.uint8)
    device, host = pair(geometry, layout, 300)
    restored = device_pool(geometry, 300)
    source, middle, destination = (torch.randperm(300)[:count] for _ in range(3))
    backup(device, host, source, middle).wait()
    load_back(host, restored, middle, destination).synchronize()
    for a, b in zip(source.tolist(), destination.tolist(), strict=True):
        assert page_bytes(restored, b, "layer_token") == page_bytes(device, a, "layer_token")
    for page in set(range(300)) - set(middle.tolist()):
        assert set(host_page(host, page)) == {POISON}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_that_are_no_numbers_are_moved_as_bytes(dtype: torch.dtype, layout: Layout) -> None:
    """NaN patterns with a payload, negative zeros, subnormals: every two-byte pattern once."""
    size = dtype.itemsize
    geometry = PageGeometry("mla", 1, 1, 2**17 // size // 2, 0, 1, dtype)
    device, host = pair(geometry, layout, 2)
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    device.layer_tensors(0)[0].view(torch.uint8)[1, 0] = patterns[: geometry.page_bytes]
    expected = page_bytes(device, 1, host.order)
    backup(device, host, slots([1]), slots([0])).wait()
    fill(device, 0)
    load_back(host, device, slots([0]), slots([1])).synchronize()
    assert page_bytes(device, 1, host.order) == expected


WRONG: list[tuple[Any, Any, str]] = [
    (slots([0, 1, 2]), slots(range(8)), "3 device pages but 8 host pages"),
    (slots([0, 1, 2]), slots(range(11)), "3 device pages but 11 host pages"),
    (slots(range(12)), slots([0, 1, 2]), "12 device pages but 3 host pages"),
    (slots([]), slots([1]), "0 device pages but 1 host pages"),
    (slots([0, 12]), slots([0, 1]), "device_indices: page 12 is outside of the pool's 12 pages"),
    (slots([0, 1]), slots([0, 12]), "host_indices: page 12 is outside"),
    (slots([0, -1]), slots([0, 1]), "device_indices: page -1 is outside"),
    (slots([0, 1]), slots([-12, 1]), "host_indices: page -12 is outside"),
    (slots([0]).int(), slots([0]), "device_indices: expected an int64 tensor.*got torch.int32"),
    (slots([0]), slots([0]).int(), "host_indices: expected an int64 tensor.*got torch.int32"),
    (slots([0]), slots([0]).float(), "torch.float32"),
    (slots([0, 1]).bool(), slots([0, 1]), "torch.bool"),
    (slots([0, 1]).view(2, 1), slots([0, 1]), r"shape \(2, 1\)"),
    (torch.tensor(0), slots([0]), r"shape \(\)"),
    ([0], slots([0]), "got list"),
    (slots([0]), None, "got NoneType"),
]


@pytest.mark.parametrize("with_draft", [False, True], ids=["target", "pair"])
@pytest.mark.parametrize(("on_device", "in_host", "match"), WRONG)
def test_indices_that_do_not_fit_are_refused_before_any_byte_moves(
    on_device: Any, in_host: Any, match: str, with_draft: bool
) -> None:
    pools = [pair(MHA, pages=12), pair(MLA, pages=12)]
    (device, host), draft = pools[0], pools[1] if with_draft else None
    before = [(rows(device), host_pages(host)) for device, host in pools]
    with pytest.raises(PageSizeMismatch, match=match):
        backup(device, host, on_device, in_host, draft=draft)
    with pytest.raises(PageSizeMismatch, match=match):
        load_back(host, device, in_host, on_device, draft=draft)
    assert [(rows(device), host_pages(host)) for device, host in pools] == before
    good = slots([3]), slots([5])
    backup(device, host, *good, draft=draft).wait()
    assert host_page(host, 5) == page_bytes(device, 3, host.order), "still good for the next"


def test_a_slot_is_written_once_but_may_be_read_often() -> None:
    device, host = pair(MHA)
    with pytest.raises(PageSizeMismatch, match="host_indices: a page is given twice"):
        backup(device, host, slots([0, 1]), slots([2, 2]))
    with pytest.raises(PageSizeMismatch, match="device_indices: a page is given twice"):
        load_back(host, device, slots([0, 1]), slots([2, 2]))
    backup(device, host, slots([1, 1]), slots([2, 3])).wait()
    assert host_page(host, 2) == host_page(host, 3) == page_bytes(device, 1, host.order)
    load_back(host, device, slots([2, 2]), slots([0, 3])).synchronize()
    assert page_bytes(device, 3, host.order) == host_page(host, 2)


@pytest.mark.parametrize(
    "other",
    [
        MLA,
        replace(MHA, layers=1),
        replace(MHA, head_dim=16, v_head_dim=16, heads=1),
        replace(MHA, dtype=torch.float16),
        replace(MHA, first_layer=2),
    ],
    ids=str,
)
def test_pools_of_other_geometries_never_meet(other: PageGeometry) -> None:
    device, host = device_pool(MHA, 2), HostPool(other, 2)
    with pytest.raises(ConfigError, match="the host pool is for"):
        backup(device, host, slots([0]), slots([0]))
    with pytest.raises(ConfigError, match="the host pool is for"):
        load_back(host, device, slots([0]), slots([0]))
    good = HostPool(MHA, 2)
    with pytest.raises(ConfigError, match="the host pool is for"):
        backup(device, good, slots([0]), slots([0]), draft=(device, host))
    assert set(host_page(host, 0)) == {0}


@pytest.mark.parametrize("draft_layers", [1, 2, 3, 5])
def test_each_layer_can_be_waited_for_and_no_other(draft_layers: int) -> None:
    target, draft = pair(replace(MHA, layers=3)), pair(replace(MLA, layers=draft_layers))
    device, host = target
    backup(device, host, slots([0]), slots([1]), draft=draft).wait()
    loading = load_back(host, device, slots([1]), slots([2]), draft=draft)
    assert loading.layers == max(3, draft_layers)
    for layer in range(loading.layers):
        loading.wait(layer)
    for layer in (-1, loading.layers):
        with pytest.raises(IndexError, match=f"layer {layer} is outside of the"):
            loading.wait(layer)
    for device, host in (target, draft):
        assert page_bytes(device, 2, host.order) == page_bytes(device, 0, host.order)


def test_indices_may_be_changed_once_the_call_has_returned() -> None:
    device, host = pair(MHA)
    source, middle = slots([1]), slots([2])
    moved = backup(device, host, source, middle)
    source.fill_(0)
    middle.fill_(0)
    moved.wait()
    assert host_page(host, 2) == page_bytes(device, 1, host.order)


@pytest.mark.parametrize(("on_device", "in_host"), [(2, 3), (3, 2), (5, 0), (0, 5)])
def test_slots_that_the_smaller_of_two_pools_lacks_are_refused(
    on_device: int, in_host: int
) -> None:
    device, host = pair(MHA, pages=6)
    draft = pair(replace(MHA, layers=1), pages=3)
    given = slots([on_device]), slots([in_host])
    refused = nullcontext() if max(on_device, in_host) < 3 else pytest.raises(PageSizeMismatch)
    with refused:
        backup(device, host, *given, draft=draft)
    with refused:
        load_back(host, device, *reversed(given), draft=draft)


def test_pools_on_two_devices_are_no_pair() -> None:
    device, host = pair(MHA)
    draft, draft_host = pair(replace(MHA, layers=1))
    draft.device = torch.device("meta")
    with pytest.raises(ConfigError, match="draft on meta, target on cpu"):
        Ends(device, host, (draft, draft_host))


def test_a_strategy_that_there_is_not_is_refused_on_the_cpu_too() -> None:
    device, host = pair(MHA)
    wrong: Any = "fastest"
    for move in (backup, load_back):
        pools = (device, host) if move is backup else (host, device)
        with pytest.raises(ConfigError, match="one of auto, kernel, copy_engine"):
            move(*pools, slots([0]), slots([0]), strategy=wrong)


@pytest.mark.parametrize("move", [backup, load_back])
def test_a_copy_keeps_its_pools(move: Any) -> None:
    device, host = pair(MHA)
    kept = [weakref.ref(pool) for pool in (device, host)]
    pools = (device, host) if move is backup else (host, device)
    moving = move(*pools, slots([0]), slots([0]))
    del device, host, pools
    gc.collect()
    assert all(pool() is not None for pool in kept)
    del moving
    gc.collect()
    assert not any(pool() is not None for pool in kept)
