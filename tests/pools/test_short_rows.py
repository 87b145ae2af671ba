"""Pages of short rows: one copy moves them, whatever lies around them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache_storage import Namespace, Store
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.page import ScatteredPage, as_spans
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.short_rows import (
    FEWEST_ROWS,
    SHORT_ROW_BYTES,
    ShortRows,
    short_rows,
)


def mha(layers: int, head_dim: int, v_head_dim: int | None = None) -> PageGeometry:
    return PageGeometry("mha", layers, 1, head_dim, v_head_dim or head_dim, 2, torch.bfloat16)


def filled(geometry: PageGeometry, layout: str = "layer_first") -> HostPool:
    pool = HostPool(geometry, 5, layout, pin=False)  # type: ignore[arg-type]
    for part in pool.parts:
        part.view(torch.uint8).random_(0, 256)
    return pool


def test_a_page_of_short_rows_is_scattered_and_is_its_spans() -> None:
    pool = filled(mha(8, 16))
    page = pool.spans(3)
    assert isinstance(page, ScatteredPage)
    expected = b"".join(
        part.view(torch.uint8)[layer, 3 * 2 : 4 * 2].numpy().tobytes()
        for part in pool.parts
        for layer in range(8)
    )
    assert b"".join(page) == b"".join(as_spans(page)) == expected
    assert page.length_bytes == len(expected) == pool.geometry.page_bytes
    copy = bytearray(len(expected))
    page.gather(memoryview(copy))
    assert copy == expected


def test_scattering_fills_the_page_and_no_other() -> None:
    pool = filled(mha(8, 16))
    before = [b"".join(pool.spans(page)) for page in range(5)]
    page = pool.spans(1)
    assert isinstance(page, ScatteredPage)
    fresh = np.random.default_rng().bytes(page.length_bytes)
    page.scatter(memoryview(fresh))
    after = [b"".join(pool.spans(page)) for page in range(5)]
    assert after == [before[0], fresh, *before[2:]]


def test_spans_of_a_scattered_page_are_the_pool_itself() -> None:
    pool = filled(mha(8, 16))
    for span in as_spans(pool.spans(2)):
        span[:] = bytes(len(span))
    assert not any(b"".join(pool.spans(2)))
    assert all(any(b"".join(pool.spans(page))) for page in (0, 1, 3, 4))


@pytest.mark.parametrize(
    ("geometry", "layout"),
    [
        (mha(FEWEST_ROWS // 2 - 1, 16), "layer_first"),  # few rows
        (mha(8, SHORT_ROW_BYTES // 4 + 8), "layer_first"),  # long ones
        (mha(8, 16, 8), "layer_first"),  # of two lengths
        (mha(8, 16), "page_first"),  # one
    ],
)
def test_pages_of_other_shapes_are_spans_in_place(geometry: PageGeometry, layout: str) -> None:
    assert isinstance(filled(geometry, layout).spans(0), tuple)


@pytest.mark.parametrize(
    "starts",
    [
        [0, 64, 128, 192, 256, 320, 384, 449],  # uneven
        [448, 384, 320, 256, 192, 128, 64, 0],  # backwards
        [0, 8, 16, 24, 32, 40, 48, 56],  # overlapping
        [0, 64, 128],  # few
    ],
)
def test_rows_that_one_array_does_not_have_are_left_alone(starts: list[int]) -> None:
    memory = memoryview(bytearray(4096))
    assert short_rows(memory, starts, step=16, length=16, num_pages=4) is None
    assert short_rows(memory, [i * 64 for i in range(8)], 16, 16, 4) is not None


@pytest.mark.parametrize("length", [64, SHORT_ROW_BYTES])
def test_a_store_writes_and_reads_both_kinds_as_the_same_bytes(length: int) -> None:
    rows = FEWEST_ROWS
    memory = np.random.default_rng().integers(0, 256, rows * 4 * length, dtype=np.uint8)
    view = short_rows(
        memory.data, [row * 4 * length for row in range(rows)], length, length, num_pages=4
    )
    assert view is not None
    namespace = Namespace(
        model="m", pool="opaque", dtype="uint8", page_size=1, page_bytes=rows * length, layers=1,
        heads=1, head_dim=1, v_head_dim=1, order="opaque",
    )  # fmt: skip
    pages = [ShortRows(view[page], rows * length) for page in range(4)]
    keys = [f"{page:064x}" for page in range(4)]
    expected = [b"".join(page) for page in pages]
    with Store(MemoryBackend(MemoryConfig()), name="memory") as store:
        store.open()
        assert store.batch_set(namespace, keys, pages) == [True] * 4
        plain = [bytearray(rows * length) for _ in range(4)]
        assert store.batch_get(namespace, keys, plain) == [True] * 4
        assert plain == expected
        memory[:] = 0
        assert store.batch_get(namespace, keys, pages) == [True] * 4
        assert [b"".join(page) for page in pages] == expected
