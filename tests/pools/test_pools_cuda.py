"""The same rules on a CUDA device: exact bytes, and nothing is reused before its event."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pools.pool_cases import (
    DTYPES,
    POISON,
    device_pool,
    fill,
    fill_random,
    host_page,
    page_bytes,
    poison,
    slots,
)

from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.transfer import backup, load_back

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row_bytes", [1, 3, 576, 656])
@pytest.mark.parametrize("count", [0, 1, 257])
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["current", "stream"])
def test_any_row_size_and_any_count_is_exact(
    layout: Layout, row_bytes: int, count: int, pin: bool, own_stream: bool
) -> None:
    geometry = PageGeometry("mla", 2, 1, row_bytes, 0, 4, torch.uint8)
    device, restored = (device_pool(geometry, 300, "cuda") for _ in range(2))
    host = HostPool(geometry, 300, layout, pin=pin)
    fill_random(device, 1)
    poison(host)
    stream = torch.cuda.Stream() if own_stream else None
    source, middle, destination = (torch.randperm(300)[:count] for _ in range(3))
    backup(device, host, source, middle, stream=stream).wait()
    load_back(host, restored, middle, destination, stream=stream).synchronize()
    for a, b in zip(source.tolist(), destination.tolist(), strict=True):
        assert page_bytes(restored, b, "layer_token") == page_bytes(device, a, "layer_token")
    for page in set(range(300)) - set(middle.tolist()):
        assert set(host_page(host, page)) == {POISON}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draft_layers", [1, 3, 5])
def test_a_pair_comes_back_on_the_paired_streams(
    layout: Layout, dtype: torch.dtype, draft_layers: int
) -> None:
    target = PageGeometry("mha", 3, 2, 7, 5, 4, dtype)
    draft = PageGeometry("mha", draft_layers, 1, 3, 3, 4, torch.bfloat16)
    pools = PairedPools(device_pool(target, 40, "cuda"), host_pages=32, layout=layout)
    assert pools.host.pinned
    assert pools.register_draft(device_pool(draft, 40, "cuda"))
    assert pools.draft_device is not None
    assert pools.draft_host is not None
    halves = [(pools.device, pools.host), (pools.draft_device, pools.draft_host)]
    for seed, (device, _) in enumerate(halves):
        fill_random(device, seed)
    source, middle, destination = (torch.randperm(32)[:20] for _ in range(3))
    expected = [
        [page_bytes(device, page, host.order) for page in source.tolist()]
        for device, host in halves
    ]
    moved = pools.backup(source, middle)
    moved.wait()
    assert moved.done()
    for (_, host), pages in zip(halves, expected, strict=True):
        assert [host_page(host, page) for page in middle.tolist()] == pages
    for device, _ in halves:
        fill(device, POISON)
    loading = pools.load_back(middle, destination)
    for layer in range(loading.layers):
        loading.wait(layer)
    for (device, host), pages in zip(halves, expected, strict=True):
        found = [page_bytes(device, page, host.order) for page in destination.tolist()]
        assert found == pages
        untouched = set(range(40)) - set(destination.tolist())
        assert {byte for page in untouched for byte in page_bytes(device, page, host.order)} == {
            POISON
        }
    with pytest.raises(IndexError):
        loading.wait(loading.layers)


def busy(milliseconds: int) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(milliseconds * 1_500_000)


def test_a_backup_waits_for_the_rows_that_the_current_stream_still_writes() -> None:
    geometry = PageGeometry("mla", 2, 1, 64, 0, 4, torch.uint8)
    pools = PairedPools(device_pool(geometry, 8, "cuda"), host_pages=8)
    busy(200)
    for layer in range(2):
        pools.device.layer_tensors(layer)[0].fill_(9)
    moved = pools.backup(slots([1]), slots([2]))
    assert not moved.done(), "the call doesn't wait"
    moved.wait()
    assert set(host_page(pools.host, 2)) == {9}


def test_a_load_back_follows_the_backups_before_it_and_holds_up_the_forward_pass_alone() -> None:
    geometry = PageGeometry("mla", 3, 1, 64, 0, 4, torch.uint8)
    pools = PairedPools(device_pool(geometry, 8, "cuda"), host_pages=8)
    busy(200)
    for layer in range(3):
        pools.device.layer_tensors(layer)[0][:4].fill_(layer + 1)
    pools.backup(slots([0]), slots([5]))
    loading = pools.load_back(slots([5]), slots([7]))
    assert not loading.done(), "the call doesn't wait"
    sums: list[Any] = []
    for layer in range(3):
        loading.wait(layer)
        sums.append(pools.device.layer_tensors(layer)[0][28:].sum())
    assert not loading.done(), "waiting for a layer doesn't hold up the CPU"
    assert [int(total) for total in sums] == [256, 512, 768]
    assert loading.done()


def test_more_pages_than_are_staged_at_a_time_come_back_exactly() -> None:
    geometry = PageGeometry("mla", 2, 1, 1 << 19, 0, 16, torch.uint8)  # 16 MiB a page
    pool, restored = (device_pool(geometry, 12, "cuda") for _ in range(2))
    fill_random(pool, 3)
    for layout in LAYOUTS:
        host = HostPool(geometry, 12, layout)
        order = torch.randperm(12)
        backup(pool, host, order, order.flip(0)).wait()
        load_back(host, restored, order.flip(0), order).synchronize()
        for layer in range(2):
            assert torch.equal(pool.layer_tensors(layer)[0], restored.layer_tensors(layer)[0])
        fill(restored, 0)


def test_indices_on_the_device_are_taken_too() -> None:
    geometry = PageGeometry("mla", 2, 1, 64, 0, 4, torch.uint8)
    pool, host = device_pool(geometry, 8, "cuda"), HostPool(geometry, 8)
    fill_random(pool, 4)
    backup(pool, host, slots([3, 1]).cuda(), slots([0, 6])).wait()
    assert host_page(host, 6) == page_bytes(pool, 1, host.order)
