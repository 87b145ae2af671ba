"""Device pools: the geometry is read from the tensors, and what can't be paged is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pools.pool_cases import DTYPES, MHA, MLA, device_pool

from hicache_storage import ConfigError
from hicache_storage.pools.device import (
    DevicePool,
    HybridDevicePool,
    MHADevicePool,
    MLADevicePool,
    paged_part,
)
from hicache_storage.pools.geometry import PageGeometry


def rows(tokens: int = 8, heads: int = 2, dim: int = 8, **options: Any) -> torch.Tensor:
    return torch.zeros(tokens, heads, dim, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(8, 8), (8, 6), (192, 128), (1, 3)])
def test_the_geometry_of_an_mha_pool_comes_from_its_tensors(
    dtype: torch.dtype, layers: int, head_dim: int, v_head_dim: int
) -> None:
    k = [rows(12, 3, head_dim, dtype=dtype) for _ in range(layers)]
    v = [rows(12, 3, v_head_dim, dtype=dtype) for _ in range(layers)]
    pool = MHADevicePool.from_tensors(k, v, 4, first_layer=2)
    assert pool.geometry == PageGeometry("mha", layers, 3, head_dim, v_head_dim, 4, dtype, 2)
    assert pool.num_pages == 3
    assert [pool.layer_tensors(i) for i in range(layers)] == list(zip(k, v, strict=True))
    assert pool.k[0].data_ptr() == k[0].data_ptr(), "the tensors stay the engine's"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("dim", [576, 656, 1, 3])
def test_the_geometry_of_an_mla_pool_comes_from_its_tensors(
    dtype: torch.dtype, layers: int, dim: int
) -> None:
    kv = [rows(8, 1, dim, dtype=dtype) for _ in range(layers)]
    pool = MLADevicePool.from_tensors(kv, 1)
    assert pool.geometry == PageGeometry("mla", layers, 1, dim, 0, 1, dtype)
    assert (pool.num_pages, pool.device) == (8, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_kept_as_uint8_keeps_its_logical_type(dtype: torch.dtype) -> None:
    pool = MLADevicePool.from_tensors([rows(8, 1, 16, dtype=torch.uint8)], 4, dtype=dtype)
    assert pool.geometry.dtype == dtype


def test_a_type_that_would_name_other_values_is_refused() -> None:
    for stored, logical in (
        (torch.bfloat16, torch.float16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.uint8, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ):
        with pytest.raises(ConfigError, match=f"elements of {stored}, expected {logical}"):
            MLADevicePool.from_tensors([rows(8, 1, 16, dtype=stored)], 4, dtype=logical)


@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
def test_page_rows_are_views_of_the_pages(geometry: PageGeometry) -> None:
    pool = device_pool(geometry, 3)
    for layer in range(geometry.layers):
        for tensor, view in zip(pool.layer_tensors(layer), pool.page_rows(layer), strict=True):
            assert view.dtype == torch.uint8
            assert tuple(view.shape[:3]) == (3, geometry.page_size, geometry.heads)
            view[1] = 7
            tokens = tensor.view(torch.uint8)
            assert bool((tokens[geometry.page_size : 2 * geometry.page_size] == 7).all())
            assert int(tokens.count_nonzero()) == tokens.numel() // 3


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_without_pages_is_refused(kind: str, num_pages: int) -> None:
    with pytest.raises(ConfigError, match=rf"DevicePool\) has {num_pages} pages"):
        device_pool(MHA if kind == "mha" else MLA, num_pages)


def freed() -> torch.Tensor:
    tensor = rows(dtype=torch.bfloat16)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("k", "match"),
    [
        (None, "has no tensor but NoneType"),
        (rows(device="meta", dtype=torch.bfloat16), "without memory behind it"),
        (freed(), "without memory behind it"),
        (rows(4, dtype=torch.bfloat16), r"shape \(4, 2, 8\), expected \(8, 2, 8\)"),
        (rows(heads=1, dtype=torch.bfloat16), r"shape \(8, 1, 8\)"),
        (rows(dim=16, dtype=torch.bfloat16)[:, :, ::2], "aren't adjacent in memory"),
    ],
)
def test_a_pool_without_physical_storage_is_refused_by_name(k: Any, match: str) -> None:
    good = rows(dtype=torch.bfloat16)
    for layer in range(2):
        layers = [(good, good), (good, good)]
        layers[layer] = (k, good)
        with pytest.raises(ConfigError, match=match) as refused:
            MHADevicePool(MHA, 2, tensors=layers)
        assert f"device pool (MHADevicePool): layer {layer}" in str(refused.value)


def test_layers_that_are_missing_are_refused() -> None:
    good = rows(dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="tensors for 1 layers, its geometry has 2"):
        MHADevicePool(MHA, 2, tensors=[(good, good)])
    with pytest.raises(ConfigError, match="layer 1 has 1 tensors, expected 2"):
        MHADevicePool(MHA, 2, tensors=[(good, good), (good,)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="same layers, got 2 and 1"):
        MHADevicePool.from_tensors([good, good], [good], 4)
    with pytest.raises(ConfigError, match="got none"):
        MLADevicePool.from_tensors([], 4)


def test_tokens_that_are_no_whole_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match="10 tokens isn't a whole number of pages of 4"):
        MLADevicePool.from_tensors([rows(10, 1)], 4)


def test_a_tensor_that_is_flat_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(tokens, heads, dim\), got shape \(8, 16\)"):
        MLADevicePool.from_tensors([torch.zeros(8, 16)], 4)


def test_the_kind_of_the_pool_is_that_of_its_geometry() -> None:
    with pytest.raises(ConfigError, match="takes an 'mha' geometry, got 'mla'"):
        MHADevicePool(MLA, 2)
    with pytest.raises(ConfigError, match="takes an 'mla' geometry, got 'mha'"):
        MLADevicePool(MHA, 2)


def full_attention(first_layer: int = 3) -> DevicePool:
    k = [rows(dtype=torch.bfloat16) for _ in range(2)]
    return MHADevicePool.from_tensors(k, k, 4, first_layer=first_layer)


def test_of_a_hybrid_pool_the_full_attention_part_is_paged() -> None:
    full = full_attention()
    hybrid = HybridDevicePool(full, [3, 7])
    assert paged_part(hybrid) is full
    assert (hybrid.geometry, hybrid.num_pages, hybrid.device) == (
        full.geometry,
        full.num_pages,
        full.device,
    )
    assert hybrid.layer_tensors(1) is full.layer_tensors(1)
    assert [hybrid.paged_layer(layer) for layer in (2, 3, 4, 7, 8)] == [None, 0, None, 1, None]


@pytest.mark.parametrize(
    ("layer_ids", "match"),
    [
        ([3], "1 layer_ids for a pool of 2 layers"),
        ([7, 3], "must ascend"),
        ([3, 3], "must ascend"),
        ([0, 7], "layer_ids start at 0, but the full-attention pool has first_layer 3"),
    ],
)
def test_a_hybrid_pool_knows_which_layers_it_pages(layer_ids: list[int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HybridDevicePool(full_attention(), layer_ids)


def test_only_pools_of_known_types_are_paged() -> None:
    pool = device_pool(MHA, 2)
    assert paged_part(pool) is pool
    assert paged_part(object()) is None
    assert paged_part(None) is None
