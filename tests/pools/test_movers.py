"""How the kernel is launched, without a device: through Triton once, then as it was compiled."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools.pool_cases import device_pool

from hicache_storage import pools
from hicache_storage.pools import movers
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.movers import _Planes
from hicache_storage.pools.routes import Routes


class Launched:
    """What launches were made, and whether as compiled."""

    def __init__(self) -> None:
        self.made: list[tuple[bool, int, tuple[Any, ...]]] = []

    def kernel(self, compiled: bool) -> Any:
        def launch(programs: int, *arguments: Any) -> Any:
            self.made.append((compiled, programs, arguments))
            return self.kernel(compiled=True)

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *arguments, **options: launch(grid[0], *arguments)

        return Kernel()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    found = Launched()
    kernels = SimpleNamespace(
        move_rows=found.kernel(compiled=False),
        ELEMENTS={1: "int8", 2: "int16", 4: "int32", 8: "int64"},
        CAN_LAUNCH_COMPILED=True,
    )
    monkeypatch.setitem(sys.modules, "hicache_storage.pools.kernels", kernels)
    monkeypatch.setattr(pools, "kernels", kernels, raising=False)
    return found


def planes(row_bytes: int) -> _Planes:
    bases = torch.zeros(2, dtype=torch.int64)
    steps = (2 * row_bytes, row_bytes)
    return _Planes([0, 0, 1, 1], bases, bases, 2, row_bytes, steps, steps, aligned=1)


SLOTS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("to_pool", [False, True])
def test_a_kernel_is_looked_for_once(launched: Launched, to_pool: bool) -> None:
    launch = planes(64).launches[to_pool]
    for count, programs in ((0, 1), (3, 2), (2, 4)):
        launch(SLOTS[:count], SLOTS[:count], range(2), programs)
    assert [(compiled, programs) for compiled, programs, _ in launched.made] == [
        (False, 1),
        (True, 2),
        (True, 4),
    ]
    constants = {arguments[9:] for _, _, arguments in launched.made}
    assert len(constants) == 1, "what was compiled in may not change"
    assert [arguments[8] for _, _, arguments in launched.made] == [0, 6, 4], "units"


def test_a_launch_counts_layers_where_it_is_told_to(launched: Launched) -> None:
    both = planes(64)
    cells = torch.zeros(8, dtype=torch.int32)
    both.launches[1](SLOTS, SLOTS, range(2), 4, cells)
    both.launches[1](SLOTS, SLOTS, range(1, 2), 4)
    (_, _, counting), (_, _, alone) = launched.made
    assert counting[4] is cells
    assert counting[5:8] == (0, 2, 2), "the first plane, planes a layer, layers"
    assert alone[4] is not cells
    assert alone[5:8] == (2, 2, 1)


def test_layers_are_counted_where_one_launch_brings_all_of_a_layer(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    del launched
    mover = movers.KernelMover()
    for v_dim, one in ((8, True), (5, False)):
        geometry = PageGeometry("mha", 3, 2, 8, v_dim, 4, torch.uint8)
        pool, host = device_pool(geometry, 4), HostPool(geometry, 4, "page_first")
        assert mover.by_layer(Routes(pool, host).host, 4) is one
    monkeypatch.setattr(movers, "_MOST_UNITS", 16)
    geometry = PageGeometry("mla", 3, 1, 8, 0, 4, torch.uint8)
    pool, host = device_pool(geometry, 5), HostPool(geometry, 5, "page_first")
    assert [mover.by_layer(Routes(pool, host).host, pages) for pages in (4, 5)] == [True, False]


def test_the_other_direction_is_another_kernel(launched: Launched) -> None:
    both = planes(64)
    for launch in both.launches:
        launch(SLOTS, SLOTS, range(2), 1)
    assert [compiled for compiled, _, _ in launched.made] == [False, False]


def test_pages_that_64_bits_count_are_left_to_triton(launched: Launched) -> None:
    """The first launch may have had no page at all, and so have been compiled for 32."""
    launch = planes((1 << 32) + 1).launches[0]
    for count in (0, 1):
        launch(SLOTS[:count], SLOTS[:count], range(2), 1)
    assert [compiled for compiled, _, _ in launched.made] == [False, False]


def test_layers_without_planes_launch_nothing(launched: Launched) -> None:
    planes(64).launches[0](SLOTS, SLOTS, range(2, 4), 1)
    assert launched.made == []
