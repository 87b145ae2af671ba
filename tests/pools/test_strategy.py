"""The rule that says which way pages take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools.pool_cases import geometries

from hicache_storage import ConfigError
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.layouts import LAYOUTS
from hicache_storage.pools.strategy import (
    STRATEGIES,
    backup_way,
    check_strategy,
    load_steps,
    loads_directly,
)

MHA = PageGeometry("mha", 32, 8, 128, 128, 64, torch.bfloat16)
MLA = PageGeometry("mla", 61, 1, 576, 0, 64, torch.bfloat16)
DRAFT = replace(MHA, layers=1)


def way(geometry: PageGeometry, layout: Any, *, run: float = 1, **given: Any) -> str:
    given = {"strategy": "auto", "kernels": True, "spaced": True, **given}
    given.setdefault("dense", layout != "page_first" or geometry.layers == 1)
    return backup_way(geometry, layout, lambda: run, **given)


def steps(geometry: PageGeometry, layout: Any, pages: int = 256, run: float = 1, **given: Any):
    given = {"strategy": "auto", "kernels": True, **given}
    given.setdefault("dense", layout != "page_first" or geometry.layers == 1)
    return list(plan(geometry, layout, pages, lambda: run, **given).values())


def plan(
    geometry: PageGeometry, layout: Any, pages: int, run_pages: Any, strategy: Any, **given: bool
) -> Any:
    direct = loads_directly(geometry, layout, pages, run_pages, strategy, **given)
    return load_steps(geometry, layout, pages, strategy, kernels=given["kernels"], direct=direct)


@given(
    geometries(),
    st.sampled_from(LAYOUTS),
    st.integers(1, 10000),
    st.floats(1, 1000),
    st.sampled_from(STRATEGIES),
    st.booleans(),
    st.booleans(),
)
def test_a_load_back_takes_every_layer_once_and_in_order(
    geometry: PageGeometry,
    layout: Any,
    pages: int,
    run: float,
    strategy: Any,
    kernels: bool,
    dense: bool,
) -> None:
    given = plan(geometry, layout, pages, lambda: run, strategy, kernels=kernels, dense=dense)
    found = list(given.values())
    assert list(given) == [step.layers.start for step in found]
    assert [layer for step in found for layer in step.layers] == list(range(geometry.layers))
    ways = {step.how for step in found}
    if not kernels:
        assert "kernel" not in ways
    if not dense:
        assert "direct" not in ways


@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
def test_large_pages_take_the_copy_engines_where_those_keep_up(geometry: PageGeometry) -> None:
    assert way(geometry, "page_first") == "staged"
    assert way(geometry, "page_first_direct") == "rows"
    assert way(geometry, "page_first_direct", spaced=False) == "staged"
    for spaced in (True, False):
        assert way(geometry, "layer_first", spaced=spaced) == "direct"
    for layout in ("layer_first", "page_first_direct"):
        given = {"strategy": "copy_engine"}
        assert {step.how for step in steps(geometry, layout, **given)} == {"direct"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_pages_take_a_kernel(layout: Any) -> None:
    small = replace(MHA, page_size=1)
    assert way(small, layout) == "kernel"
    assert {step.how for step in steps(small, layout, 16384)} == {"kernel"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engine_alone_needs_no_kernel_that_crosses_the_link(layout: Any) -> None:
    for geometry in (MHA, MLA, DRAFT, replace(MHA, page_size=1)):
        for kernels in (False, True):
            given = {"strategy": "copy_engine", "kernels": kernels}
            for run in (1, 300):
                assert way(geometry, layout, run=run, **given) in ("direct", "rows", "staged")
            ways = {step.how for step in steps(geometry, layout, **given)}
            assert ways <= {"direct", "staged"}
    assert way(MHA, layout, strategy="kernel", kernels=False) != "kernel"


@pytest.mark.parametrize(
    ("geometry", "layout", "how"),
    [
        (MHA, "layer_first", "direct"),
        (MLA, "layer_first", "direct"),
        (MHA, "page_first", "kernel"),
        (MLA, "page_first", "kernel"),
        (MHA, "page_first_direct", "direct"),
        (MLA, "page_first_direct", "direct"),
        *((replace(MHA, page_size=16), layout, "kernel") for layout in LAYOUTS),
        *((DRAFT, layout, "direct") for layout in LAYOUTS),
    ],
)
def test_a_load_back_goes_layer_by_layer(geometry: PageGeometry, layout: Any, how: str) -> None:
    """A forward pass waits for each layer."""
    found = steps(geometry, layout)
    assert {step.how for step in found} == {how}
    assert len(found) == geometry.layers
    in_runs = steps(geometry, "layer_first", run=4)
    assert {step.how for step in in_runs} == {"direct"}
    if how == "direct":
        for strategy in STRATEGIES:
            without = steps(geometry, layout, kernels=False, strategy=strategy)
            assert {step.how for step in without} == {"direct"}, "no kernel to leave it to"


def test_nobody_looks_for_runs_that_would_make_no_difference() -> None:
    """It takes as long as the first copies."""

    def run_pages() -> float:
        raise AssertionError("looked for")

    small = replace(MHA, page_size=1)
    for geometry, layout, pages, strategy in (
        (MHA, "layer_first", 256, "auto"),
        (small, "layer_first", 31, "auto"),
        (small, "page_first", 16384, "auto"),
        (small, "layer_first", 16384, "kernel"),
    ):
        given: Any = {"kernels": True, "dense": True}
        plan(geometry, layout, pages, run_pages, strategy, **given)


@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
def test_token_layer_pages_come_whole_by_copy_engine(geometry: PageGeometry) -> None:
    """Some of their layers would be many short rows."""
    found = steps(geometry, "page_first", strategy="copy_engine")
    assert [step.layers for step in found] == [range(geometry.layers)]
    deep = replace(MHA, layers=80)
    groups = steps(deep, "page_first", strategy="copy_engine")
    assert [len(step.layers) for step in groups] == [26, 27, 27]


def test_small_layer_token_pages_come_in_groups_of_layers_by_copy_engine() -> None:
    """As many as make a copy long."""
    for geometry in (replace(MHA, page_size=16), replace(MLA, page_size=16)):
        stretch = min(geometry.part_bytes) // geometry.layers
        found = steps(geometry, "page_first_direct", strategy="copy_engine")
        assert {step.how for step in found} == {"staged"}
        assert all(512 << 10 <= len(step.layers) * stretch < 1 << 20 for step in found)
        assert len(found) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_pages_take_few_steps(layout: Any) -> None:
    """A step moves some 2 MiB at least: launches and events cost more than small layers."""
    assert len(steps(MHA, layout, pages=1)) <= 4
    assert len(steps(replace(MHA, page_size=1), layout, pages=1)) == 1


def test_a_strategy_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of auto, kernel, copy_engine; got 'direct'"):
        check_strategy("direct")
