"""Every kind of page on a CUDA device, each way that it may take: the bytes are the CPU's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from pools.cuda_cases import ORDERS, Model, Twins

from hicache_storage.pools import lanes, movers, strategy
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.strategy import STRATEGIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
KINDS = {
    "mha": PageGeometry("mha", 5, 4, 64, 64, 1, torch.bfloat16),
    "mha of two sizes": PageGeometry("mha", 3, 2, 96, 64, 1, torch.bfloat16),
    "mla": PageGeometry("mla", 5, 1, 576, 0, 1, torch.bfloat16),
    "full-attention layers of a hybrid": PageGeometry(
        "mha", 2, 2, 128, 128, 1, torch.bfloat16, first_layer=3
    ),
}
PAGES = {1: 64, 16: 40, 64: 24, 128: 16}
"""By page size: enough for runs, and few enough for the CPU's part."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The CPU's part is small, and several test processes share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a few pages arrive one by one too, as those of many do."""
    monkeypatch.setattr(strategy, "_STEP_BYTES", 1)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(params=["triton", "torch"])
def _mover(request: pytest.FixtureRequest) -> Iterator[None]:
    """With Triton, and as if it weren't installed."""
    lanes.shared_lane.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(lanes, "cuda_mover", movers.TorchMover)
        yield
    lanes.shared_lane.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_cpu_copies_beside_a_running_model(
    kind: str, layout: Layout, page_size: int, dtype: torch.dtype, model: Model
) -> None:
    geometry = replace(KINDS[kind], page_size=page_size, dtype=dtype)
    pages = PAGES[page_size]
    twins = Twins(geometry, pages, layout, beside=model.forward)
    for chosen, order in itertools.product(STRATEGIES, ORDERS):
        twins.check(chosen, pages * 5 // 8, order)


@pytest.mark.parametrize("order", ["random", "runs"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "geometry",
    [
        PageGeometry("mha", 32, 8, 128, 128, 64, torch.bfloat16),
        PageGeometry("mla", 61, 1, 576, 0, 64, torch.bfloat16),
        PageGeometry("mha", 1, 8, 128, 128, 128, torch.bfloat16),
    ],
    ids=["mha", "mla", "draft"],
)
def test_pages_of_real_models_are_exact_by_the_rule(
    geometry: PageGeometry, layout: Layout, order: str
) -> None:
    """Copy engines and kernels, more pages than are staged at a time."""
    Twins(geometry, 20, layout).check("auto", 20, order)


@pytest.mark.usefixtures("_mover")
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("row_bytes", [1, 3, 8, 576, 656])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_row_size_and_any_count_is_exact(layout: Layout, row_bytes: int, pin: bool) -> None:
    for heads, strided, count in ((1, False, 0), (1, True, 1), (2, False, 13), (2, True, 13)):
        geometry = PageGeometry("mha", 2, heads, row_bytes, row_bytes, 4, torch.uint8)
        twins = Twins(geometry, 20, layout, strided=strided, pin=pin)
        for chosen in ("kernel", "copy_engine"):
            twins.check(chosen, count)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_pages_than_are_staged_at_a_time_come_back_exactly(layout: Layout) -> None:
    geometry = PageGeometry("mla", 2, 1, 1 << 19, 0, 16, torch.uint8)  # 16 MiB a page
    Twins(geometry, 12, layout).check("copy_engine", 10)


def test_a_page_larger_than_a_staging_half_comes_back_exactly() -> None:
    geometry = PageGeometry("mla", 2, 1, 1 << 20, 0, 40, torch.uint8)  # 80 MiB a page
    Twins(geometry, 3, "page_first").check("copy_engine", 2)
