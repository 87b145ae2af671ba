"""Host pages as spans: the very bytes of SGLang's flat page, in place, whatever the layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from adapters.fake_sglang import (
    LAYOUTS,
    MhaHostPool,
    MlaHostPool,
    SlotsOnlyPool,
    StateHostPool,
    UnequalHostPool,
    fill,
    indices,
    page_bytes,
)

from hicache_storage import ConfigError, PageSizeMismatch
from hicache_storage.adapters.sglang_pages import InPlacePages, host_pages, tensor_spans
from hicache_storage.page import ScatteredPage

POOLS = [
    pytest.param(cls, {"layout": layout, "page_size": size, "dtype": dtype, **shape}, id=name)
    for cls, layout, size, dtype, shape in [
        (cls, *rest)
        for cls in (MhaHostPool, MlaHostPool)
        for rest in itertools.product(
            LAYOUTS, (1, 4, 64), (torch.bfloat16, torch.uint8), ({}, {"dim": 41, "layers": 1})
        )
    ]
    for name in [f"{cls.__name__}-{layout}-{size}-{dtype}-{shape or 'plain'}"]
]


@pytest.mark.parametrize(("cls", "options"), POOLS)
def test_spans_are_the_flat_pages_bytes_in_place(cls: Any, options: Any) -> None:
    pool = cls(**options)
    fill(pool)
    pages = host_pages(pool)
    assert pages.in_place
    for page in (2, 0, 3, pool.page_num - 1):
        (spans,) = pages.to_write([page])
        assert b"".join(spans) == page_bytes(pool, page)
        assert sum(map(len, spans)) == pages.page_bytes


@pytest.mark.parametrize(("cls", "options"), POOLS)
def test_a_read_fills_its_page_and_no_other(cls: Any, options: Any) -> None:
    pool, other = cls(**options), cls(**options)
    fill(pool)
    before = [page_bytes(pool, page) for page in range(pool.page_num)]
    fill(other, seed=1)
    buffers, finish = host_pages(pool).to_read([3])
    for span, source in zip(buffers[0], host_pages(other).to_write([5])[0], strict=True):
        span[:] = source
    finish([True])
    after = [page_bytes(pool, page) for page in range(pool.page_num)]
    assert after == [*before[:3], page_bytes(other, 5), *before[4:]]


@pytest.mark.parametrize(("cls", "layers"), [(MhaHostPool, 4), (MlaHostPool, 8)])
def test_a_page_of_many_short_rows_is_copied_as_a_whole(cls: Any, layers: int) -> None:
    pool, other = (cls("layer_first", layers=layers) for _ in range(2))
    fill(pool)
    (page,) = host_pages(pool).to_write([2])
    assert isinstance(page, ScatteredPage)
    copy = bytearray(page.length_bytes)
    page.gather(memoryview(copy))
    assert copy == page_bytes(pool, 2)
    (place,), finish = host_pages(other).to_read([1])
    assert isinstance(place, ScatteredPage)
    place.scatter(memoryview(copy))
    finish([True])
    assert page_bytes(other, 1) == copy
    assert not any(page_bytes(other, 0) + page_bytes(other, 2))


def test_a_layer_first_page_is_all_of_k_and_then_all_of_v() -> None:
    pool = MhaHostPool("layer_first")
    fill(pool)
    (spans,) = host_pages(pool).to_write([1])
    assert len(spans) == 2 * pool.layer_num
    k_and_v = torch.cat([part[:, 4:8].flatten() for part in (pool.k_buffer, pool.v_buffer)])
    assert b"".join(spans) == bytes(k_and_v.view(torch.uint8).numpy().data)


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_pools_of_few_pages_are_in_place_too(pages: int) -> None:
    pool = MhaHostPool("layer_first", pages=pages)
    fill(pool)
    found = host_pages(pool)
    assert found.in_place
    assert b"".join(found.to_write([pages - 1])[0]) == page_bytes(pool, pages - 1)


def test_parts_of_unequal_size_are_spans_by_address() -> None:
    pool = UnequalHostPool()
    fill(pool)
    pages = host_pages(pool)
    assert pages.in_place
    (spans,) = pages.to_write([5])
    assert [len(span) for span in spans] == [2 * 4 * 2 * 8 * 2, 2 * 4 * 2 * 4 * 2]
    parts: list[torch.Tensor] = pool.kv_buffer  # type: ignore[assignment]
    whole = torch.cat([part[20:24].flatten() for part in parts])
    assert b"".join(spans) == bytes(whole.view(torch.uint8).numpy().data)


@pytest.mark.parametrize("addressed", [True, False])
def test_pages_shown_as_copies_are_the_same_bytes_by_address_or_copied(addressed: bool) -> None:
    pool, twin = StateHostPool(addressed=addressed), StateHostPool(addressed=addressed)
    fill(pool)
    pages, others = host_pages(pool), host_pages(twin)
    assert pages.in_place is addressed
    (spans,) = pages.to_write([6])
    assert b"".join(spans) == page_bytes(pool, 6)
    buffers, finish = others.to_read([2, 3])
    for span, source in zip(buffers[0], spans, strict=True):
        span[:] = source
    finish([True, False])
    assert page_bytes(twin, 2) == page_bytes(pool, 6)
    assert not any(page_bytes(twin, 3))
    others.zero(2)
    assert not any(page_bytes(twin, 2))


def test_addresses_of_another_order_than_the_flat_page_are_not_used() -> None:
    class Swapped(StateHostPool):
        def _parts(self, index: int) -> list[torch.Tensor]:
            return super()._parts(index)

        def get_page_buffer_meta(self, indices: Any) -> Any:
            pointers, sizes = super().get_page_buffer_meta(indices)
            return pointers[::-1], sizes[::-1]

    pool = Swapped()
    fill(pool)
    pages = host_pages(pool)
    assert not pages.in_place
    assert b"".join(pages.to_write([4])[0]) == page_bytes(pool, 4)


def test_addresses_outside_of_the_pools_memory_are_not_touched() -> None:
    class Astray(UnequalHostPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            pointers, sizes = super().get_page_buffer_meta(indices)
            return [pointer + (1 << 40) for pointer in pointers], sizes

    with pytest.raises(ConfigError, match="shows its pages in no known way"):
        host_pages(Astray())


def test_a_pool_whose_pages_move_is_copied() -> None:
    pool = MhaHostPool()
    pool.shared_allocation_domain = object()  # type: ignore[attr-defined]
    assert not host_pages(pool).in_place


def test_the_pools_memory_outlives_the_pool() -> None:
    pool = MhaHostPool()
    fill(pool)
    wanted = page_bytes(pool, 1)
    pages = host_pages(pool)
    (spans,) = pages.to_write([1])
    del pool.kv_buffer
    pages.pool = None
    assert b"".join(spans) == wanted


def test_a_pool_without_memory_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="host pool SlotsOnlyPool has no memory of its own"):
        host_pages(SlotsOnlyPool())


def test_indices_name_whole_pages_in_any_order() -> None:
    pages = host_pages(MhaHostPool())
    assert pages.pages(3, indices(pages.pool, 2, 0, 3)) == [2, 0, 3]
    assert pages.pages(0, None) == []


@pytest.mark.parametrize(
    ("count", "given"),
    [
        (3, torch.arange(8)),
        (3, torch.arange(11)),
        (1, None),
        (1, torch.arange(1, 5)),
        (1, torch.tensor([0, 1, 2, 4])),
        (2, torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])),
        (1, torch.arange(32, 36)),
        (1, torch.arange(-4, 0)),
    ],
)
def test_indices_that_are_no_pages_are_refused(count: int, given: Any) -> None:
    pages = host_pages(MhaHostPool())
    with pytest.raises(PageSizeMismatch):
        pages.pages(count, given)


def test_a_tensor_that_is_no_contiguous_memory_is_refused() -> None:
    with pytest.raises(PageSizeMismatch, match="contiguous host memory"):
        tensor_spans(torch.zeros(4, 4).t()[1:])
    assert isinstance(host_pages(MhaHostPool()), InPlacePages)
