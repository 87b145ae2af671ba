"""Stretches: their copies are those that copies of rows would be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools.pool_cases import MHA, MLA, device_pool, strided_pool
from pools.simulated_lane import as_slots

from hicache_storage.pools.device import MLADevicePool
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.routes import Routes
from hicache_storage.pools.row_copies import runs, view_copies
from hicache_storage.pools.stretches import Copies

PAGES = 6


@given(
    st.sampled_from([MHA, MLA, replace(MHA, v_head_dim=3), replace(MLA, layers=1)]),
    st.sampled_from(LAYOUTS),
    st.integers(0, PAGES),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_they_copy_what_copies_of_rows_do(
    geometry: object, layout: Layout, count: int, random: object, to_device: bool
) -> None:
    pool, host = device_pool(geometry, PAGES), HostPool(geometry, PAGES, layout)  # type: ignore[arg-type]
    route = Routes(pool, host)
    if route.stretches is None:
        assert layout == "page_first"
        return
    in_host = as_slots(sorted(random.sample(range(PAGES), count)))  # type: ignore[attr-defined]
    on_device = as_slots(random.sample(range(PAGES), count))  # type: ignore[attr-defined]
    found = runs(in_host, on_device)
    pages = route.stretches.of(on_device, in_host, found, to_device=to_device)
    for layer in route.host.layers:
        one_by_one = route.stretches.one_by_one(layer, on_device, in_host, to_device=to_device)
        assert _bytes(one_by_one) == _bytes(pages.of(layer))
        expected: dict[int, tuple[int, int]] = {}
        for rows, other in route.host.ends(layer):
            ends = (other, rows) if to_device else (rows, other)
            slots = (in_host, on_device) if to_device else (on_device, in_host)
            for piece in view_copies(*ends, *slots, runs(*slots)):
                for row in range(piece.height):
                    for source, target in zip(
                        piece.source.tolist(), piece.target.tolist(), strict=True
                    ):
                        start = source + row * piece.source_pitch
                        expected[start] = (target + row * piece.target_pitch, piece.width)
        copies = pages.of(layer).T.tolist()
        assert {source: (target, size) for source, target, size in copies} == expected


def _bytes(copies: Copies) -> dict[int, int]:
    """Where each byte goes, by where it is from."""
    return {
        source + i: target + i for source, target, size in copies.T.tolist() for i in range(size)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_are_none_where_a_page_of_a_layer_is_several_stretches(layout: Layout) -> None:
    host = HostPool(MHA, PAGES, layout)
    assert Routes(strided_pool(MHA, PAGES), host).stretches is None
    assert (Routes(device_pool(MHA, PAGES), host).stretches is None) is (layout == "page_first")


def test_pages_that_are_not_adjacent_at_both_ends_are_copied_one_by_one() -> None:
    """Of one token each, so that a page is one stretch all the same."""
    geometry = replace(MLA, page_size=1)
    route = Routes(strided_pool(geometry, PAGES), HostPool(geometry, PAGES, "layer_first"))
    assert route.stretches is not None
    slots = as_slots([0, 1, 2])
    for to_device in (False, True):
        pages = route.stretches.of(slots, slots, runs(slots, slots), to_device=to_device)
        assert pages.of(0).shape == (3, 3)


def test_there_are_none_where_layers_lie_differently() -> None:
    tokens, dim = PAGES, MLA.head_dim
    dense = torch.zeros(tokens, 1, dim, dtype=MLA.dtype)
    apart = torch.zeros(tokens, 3, dim, dtype=MLA.dtype)[:, 1:2]
    geometry = replace(MLA, page_size=1)
    host = HostPool(geometry, PAGES, "layer_first")
    for layers, found in (([dense, dense.clone()], True), ([dense, apart], False)):
        pool = MLADevicePool.from_tensors(layers, 1)
        assert (Routes(pool, host).stretches is not None) is found
