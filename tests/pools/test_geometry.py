"""PageGeometry: sizes and namespaces follow from the pool's own shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from pools.pool_cases import DTYPES, MHA, MLA, device_pool, geometries

from hicache_storage import ConfigError
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.ranks import Ranks


@given(geometries())
def test_a_page_is_as_large_as_its_rows(geometry: PageGeometry) -> None:
    pool = device_pool(geometry, 3)
    tensors = [t for layer in range(geometry.layers) for t in pool.layer_tensors(layer)]
    assert 3 * geometry.page_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert sum(geometry.part_bytes) == geometry.page_bytes


@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_namespace_names_the_logical_type(geometry: PageGeometry, dtype: torch.dtype) -> None:
    namespace = replace(geometry, dtype=dtype).namespace(model="m", order="layer_token")
    assert namespace.dtype == str(dtype).removeprefix("torch.")


def test_float8_types_that_are_stored_alike_are_two_namespaces() -> None:
    one, other = (
        replace(MHA, dtype=dtype).namespace(model="m", order="layer_token")
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    )
    assert one.page_bytes == other.page_bytes
    assert one != other


def test_the_namespace_says_everything_that_the_geometry_does() -> None:
    geometry = PageGeometry("mha", 3, 2, 8, 6, 4, torch.float16, first_layer=5)
    namespace = geometry.namespace(
        model="m", order="token_layer", revision="r", tenant="t", **Ranks(1, 2, 3, 4, 5, 6).fields()
    )
    assert namespace.differences(namespace) == []
    assert (namespace.pool, namespace.layers, namespace.heads) == ("mha", 3, 2)
    assert (namespace.head_dim, namespace.v_head_dim, namespace.page_size) == (8, 6, 4)
    assert (namespace.page_bytes, namespace.first_layer) == (3 * 4 * 2 * (8 + 6) * 2, 5)
    assert (namespace.model, namespace.revision, namespace.tenant) == ("m", "r", "t")
    assert (namespace.tp_rank, namespace.tp_size) == (1, 2)
    assert (namespace.pp_rank, namespace.pp_size) == (3, 4)
    assert (namespace.cp_rank, namespace.cp_size) == (5, 6)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 1},
        {"heads": 4},
        {"head_dim": 16},
        {"v_head_dim": 16},
        {"page_size": 8},
        {"dtype": torch.float16},
        {"first_layer": 2},
    ],
    ids=str,
)
def test_another_geometry_is_another_namespace(change: dict[str, Any]) -> None:
    one, other = (
        geometry.namespace(model="m", order="layer_token")
        for geometry in (MHA, replace(MHA, **change))
    )
    assert one != other


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "r2"},
        {"target_model": "other"},
        {"target_revision": "t2"},
        {"tenant": "t"},
        {"revision": "' for 'a", "target_model": "b"},
    ],
    ids=str,
)
def test_a_draft_page_belongs_to_both_models(change: dict[str, str]) -> None:
    def draft(
        model: str = "d",
        revision: str = "r1",
        target_model: str = "m",
        target_revision: str = "t1",
        tenant: str = "",
    ) -> Any:
        target = MHA.namespace(
            model=target_model, order="layer_token", revision=target_revision, tenant=tenant
        )
        return MLA.draft_namespace(target, model=model, revision=revision, order="layer_token")

    assert draft() == draft()
    assert draft() != draft(**change)


def test_a_draft_without_a_name_is_refused() -> None:
    target = MHA.namespace(model="m", order="layer_token")
    with pytest.raises(ConfigError, match="draft_model"):
        MLA.draft_namespace(target, model="", order="layer_token")


@pytest.mark.parametrize(
    ("base", "change", "match"),
    [
        (MHA, {"kind": "gqa"}, "kind must be 'mha' or 'mla', got 'gqa'"),
        (MHA, {"layers": 0}, "layers must be at least 1: 0"),
        (MHA, {"heads": 0}, "heads"),
        (MHA, {"head_dim": 0}, "head_dim"),
        (MHA, {"v_head_dim": 0}, "v_head_dim"),
        (MHA, {"page_size": 0}, "page_size"),
        (MHA, {"first_layer": -1}, "first_layer"),
        (MLA, {"heads": 2}, "heads 1"),
        (MLA, {"v_head_dim": 16}, "v_head_dim 0"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(
    base: PageGeometry, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        replace(base, **change)
