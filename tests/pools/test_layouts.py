"""Host layouts: SGLang's shapes and page extents, and bytes that follow from the order alone."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools.pool_cases import (
    MHA,
    MLA,
    device_pool,
    fill_random,
    geometries,
    host_page,
    page_bytes,
    parts,
    slots,
)

from hicache_storage import ConfigError
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import LAYOUTS, Layout, token_order
from hicache_storage.pools.transfer import backup, load_back

L, P, S, H, D = 2, 25, 4, 2, 8
"""The pools that SGLang's extents below were read from: 100 tokens."""

SHAPES: list[tuple[PageGeometry, Layout, tuple[int, ...]]] = [
    (MHA, "layer_first", (2, L, P * S, H, D)),
    (MHA, "page_first", (2, P * S, L, H, D)),
    (MHA, "page_first_direct", (2, P, L, S, H, D)),
    (MLA, "layer_first", (L, P * S, 1, 16)),
    (MLA, "page_first", (P * S, L, 1, 16)),
    (MLA, "page_first_direct", (P, L, S, 1, 16)),
]

# Offsets from kv_buffer of the extents of pages 0 and 1, as SGLang's get_page_buffer_meta gives
# them (K0, V0, K1, V1 there; all of K and then all of V here), and the bytes of each.
EXTENTS: list[tuple[PageGeometry, Layout, list[list[int]], int]] = [
    (MHA, "layer_first", [[0, 3200, 6400, 9600], [128, 3328, 6528, 9728]], 128),
    (MHA, "page_first", [[0, 6400], [256, 6656]], 256),
    (MHA, "page_first_direct", [[0, 6400], [256, 6656]], 256),
    (MLA, "layer_first", [[0, 3200], [128, 3328]], 128),
    (MLA, "page_first", [[0], [256]], 256),
    (MLA, "page_first_direct", [[0], [256]], 256),
]


def address(span: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(span))


@pytest.mark.parametrize(("geometry", "layout", "shape"), SHAPES)
def test_the_shape_is_that_of_sglang(
    geometry: PageGeometry, layout: Layout, shape: tuple[int, ...]
) -> None:
    buffer = HostPool(geometry, P, layout).kv_buffer
    assert buffer is not None
    assert tuple(buffer.shape) == shape
    assert buffer.dtype == geometry.dtype


@pytest.mark.parametrize(("geometry", "layout", "offsets", "length"), EXTENTS)
def test_the_spans_of_a_page_are_the_extents_of_sglang(
    geometry: PageGeometry, layout: Layout, offsets: list[list[int]], length: int
) -> None:
    host = HostPool(geometry, P, layout)
    assert host.kv_buffer is not None
    base = host.kv_buffer.data_ptr()
    for page, expected in enumerate(offsets):
        assert [address(span) - base for span in host.spans(page)] == expected
        assert {len(span) for span in host.spans(page)} == {length}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_every_element_lands_where_the_order_says(
    layout: Layout, page_size: int, kind: Any
) -> None:
    heads, v_dim = (3, 5) if kind == "mha" else (1, 0)
    geometry = PageGeometry(kind, 3, heads, 7, v_dim, page_size, torch.float32)
    pool, host = device_pool(geometry, 4), HostPool(geometry, 4, layout)
    number = 0
    for part in parts(pool):
        for tensor in part:
            # An element of its own for every (part, layer, token, head, dim).
            names = torch.arange(number, number + tensor.numel(), dtype=torch.int32)
            tensor.view(torch.int32).copy_(names.view(tensor.shape))
            number += tensor.numel()
    backup(pool, host, slots([2, 0, 3]), slots([1, 3, 0])).wait()
    for source, slot in ((2, 1), (0, 3), (3, 0)):
        assert host_page(host, slot) == page_bytes(pool, source, host.order)
    assert host_page(host, 2) == bytes(geometry.page_bytes)


@given(geometries(), st.sampled_from(LAYOUTS))
def test_the_parts_are_the_spans_seen_as_tensors(geometry: PageGeometry, layout: Layout) -> None:
    """What an engine reads from the typed tensors is what storage put into the spans."""
    pool, host = device_pool(geometry, 2), HostPool(geometry, 2, layout)
    fill_random(pool, 1)
    page = page_bytes(pool, 1, host.order)
    start = 0
    for span in host.spans(1):
        span[:] = page[start : start + len(span)]
        start += len(span)
    tokens = range(geometry.page_size, 2 * geometry.page_size)
    for part, tensors in zip(host.parts, parts(pool), strict=True):
        for layer, tensor in enumerate(tensors):
            for token in tokens:
                index: tuple[int, ...] = (layer, token)
                if layout == "page_first":
                    index = (token, layer)
                elif layout == "page_first_direct":
                    index = (1, layer, token - geometry.page_size)
                assert torch.equal(part[index].view(torch.uint8), tensor[token].view(torch.uint8))


@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("writer", LAYOUTS)
@pytest.mark.parametrize("reader", LAYOUTS)
def test_layouts_share_pages_exactly_if_they_give_the_same_bytes(
    geometry: PageGeometry, writer: Layout, reader: Layout
) -> None:
    pool, restored = device_pool(geometry, 2), device_pool(geometry, 2)
    fill_random(pool, 2)
    written, read = HostPool(geometry, 2, writer), HostPool(geometry, 2, reader)
    backup(pool, written, slots([1]), slots([0])).wait()
    page = host_page(written, 0)
    start = 0
    for span in read.spans(1):
        span[:] = page[start : start + len(span)]
        start += len(span)
    load_back(read, restored, slots([1]), slots([0])).synchronize()
    same = page_bytes(restored, 0, "layer_token") == page_bytes(pool, 1, "layer_token")
    spaces = [geometry.namespace(model="m", order=host.order) for host in (written, read)]
    assert (spaces[0] == spaces[1]) is same
    assert same is (token_order(writer) == token_order(reader))


@pytest.mark.parametrize("layout", ["page_head", "", "Page_First"])
def test_an_unknown_layout_is_refused_with_those_that_there_are(layout: Any) -> None:
    with pytest.raises(ConfigError, match="layer_first, page_first, page_first_direct"):
        HostPool(MHA, 2, layout)
