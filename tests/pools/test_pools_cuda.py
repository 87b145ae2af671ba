"""The same rules on a CUDA device: exact bytes, and nothing is reused before its event."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from pools.cuda_cases import Twins, storages
from pools.pool_cases import (
    DTYPES,
    POISON,
    device_pool,
    fill,
    host_page,
    page_bytes,
    poison,
    slots,
)

from hicache_storage import ConfigError
from hicache_storage.pools import cuda_load_back, lanes, movers
from hicache_storage.pools.device import DevicePool, HybridDevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.strategy import STRATEGIES, Strategy
from hicache_storage.pools.transfer import backup, load_back

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
PAGES = 40


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """The CPU's part is small; several test processes share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def redraw(pool: DevicePool) -> None:
    """Fresh random bytes everywhere."""
    for memory in storages(pool):
        memory.random_(0, 256)


def on_cpu(pool: DevicePool) -> DevicePool:
    """What the device holds now, in one read a part."""
    copied = device_pool(pool.geometry, pool.num_pages)
    for here, there in zip(storages(copied), storages(pool), strict=True):
        here.copy_(there)
    return copied


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draft_layers", [1, 3, 5])
def test_a_pair_comes_back_on_the_paired_streams(
    layout: Layout, draft_layers: int, strategy: Strategy
) -> None:
    dtype = random.choice(DTYPES)
    target = PageGeometry("mha", 3, 2, 7, 5, 4, dtype, first_layer=1)
    draft = PageGeometry("mha", draft_layers, 1, 3, 3, 4, torch.bfloat16)
    pools = PairedPools(
        HybridDevicePool(device_pool(target, 40, "cuda"), [1, 4, 6]),
        host_pages=32,
        layout=layout,
        strategy=strategy,
    )
    assert pools.host.pinned
    assert pools.register_draft(device_pool(draft, 40, "cuda"))
    assert pools.draft_device is not None
    assert pools.draft_host is not None
    halves = [(pools.device, pools.host), (pools.draft_device, pools.draft_host)]
    for device, host in halves:
        redraw(device)
        host._memory.tensor.fill_(POISON)
    source, middle, destination = (torch.randperm(32)[:20] for _ in range(3))
    expected = []
    for device, host in halves:
        kept = on_cpu(device)
        expected.append([page_bytes(kept, page, host.order) for page in source.tolist()])
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
        found = on_cpu(device)
        assert [page_bytes(found, page, host.order) for page in destination.tolist()] == pages
        for page in set(range(40)) - set(destination.tolist()):
            assert set(page_bytes(found, page, host.order)) == {POISON}
    with pytest.raises(IndexError):
        loading.wait(loading.layers)


def busy(milliseconds: int, stream: Any = None) -> None:
    """Keeps the current stream, or this one, busy."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(milliseconds * 1_500_000)


def small_pools(layout: Layout = "page_first", strategy: Strategy = "auto") -> PairedPools:
    """Three layers of 256 bytes a page, every kernel that the tests use loaded."""
    geometry = PageGeometry("mla", 3, 1, 64, 0, 4, torch.uint8)
    pools = PairedPools(
        device_pool(geometry, 8, "cuda"), host_pages=8, layout=layout, strategy=strategy
    )
    poison(pools.host)
    for layer in range(3):
        pools.device.layer_tensors(layer)[0].fill_(0).sum()
    torch.cuda.synchronize()
    return pools


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backup_waits_for_the_rows_that_the_current_stream_still_writes(
    layout: Layout, strategy: Strategy
) -> None:
    pools = small_pools(layout, strategy)
    busy(200)
    for layer in range(3):
        pools.device.layer_tensors(layer)[0].fill_(9)
    moved = pools.backup(slots([1]), slots([2]))
    assert not moved.done(), "the call doesn't wait"
    moved.wait()
    assert set(host_page(pools.host, 2)) == {9}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_back_follows_the_backups_before_it_and_holds_up_the_forward_pass_alone(
    layout: Layout, strategy: Strategy
) -> None:
    pools = small_pools(layout, strategy)
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backup_follows_the_load_back_that_writes_its_pages(strategy: Strategy) -> None:
    pools = small_pools(strategy=strategy)
    assert pools._back_lane is not None
    for stream in pools._back_lane.streams:
        busy(200, stream)
    pools.load_back(slots([3]), slots([6]))
    moved = pools.backup(slots([6]), slots([4]))
    assert not moved.done()
    moved.wait()
    assert set(host_page(pools.host, 4)) == {POISON}


def test_copies_both_ways_that_share_no_slot_do_not_wait_for_each_other() -> None:
    pools = small_pools()
    assert pools._out_lane is not None
    for stream in pools._out_lane.streams:
        busy(300, stream)
    moved = pools.backup(slots([1]), slots([1]))
    loading = pools.load_back(slots([2]), slots([2]))
    loading.synchronize()
    assert not moved.done()
    moved.wait()


def test_layers_arrive_one_after_the_other() -> None:
    """The forward pass may start on the first layers while most of the bytes are on their way.

    Seen in one of many tries: where the CPU is busy, all bytes may be there before it looks.
    """
    geometry = PageGeometry("mha", 32, 8, 128, 128, 64, torch.bfloat16)
    for layout in LAYOUTS:
        pools = PairedPools(device_pool(geometry, 64, "cuda"), host_pages=64, layout=layout)
        pages = torch.randperm(64)
        assert any(first_layer_comes_before_the_last(pools, pages) for _ in range(50)), layout


def first_layer_comes_before_the_last(pools: PairedPools, pages: torch.Tensor) -> bool:
    loading = pools.load_back(pages, pages)
    while not loading.arrived(0):
        pass
    before = not loading.done()
    loading.synchronize()
    return before


@pytest.mark.parametrize(("v_head_dim", "launched"), [(128, 1), (64, 8)])
def test_a_kernel_says_of_each_layer_that_it_is_there(v_head_dim: int, launched: int) -> None:
    """In one launch if K and V are alike; again and again, and after a call that failed."""
    geometry = PageGeometry("mha", 8, 8, 128, v_head_dim, 64, torch.bfloat16)
    pools = PairedPools(device_pool(geometry, PAGES, "cuda"), host_pages=PAGES, layout="page_first")
    redraw(pools.device)
    pages, lane = torch.randperm(PAGES), pools._back_lane
    assert lane is not None
    assert lane.signals is not None, "this driver can't wait for a kernel"
    pools.backup(pages, pages).wait()
    kept = [rows.clone() for rows in storages(pools.device)]
    for fails in (False, False, True, False, True, False) if launched == 1 else (False,):
        for rows in storages(pools.device):
            rows.fill_(POISON)
        with mock.patch.object(lane.mover, "move", wraps=lane.mover.move) as launches:
            if fails:
                with (
                    mock.patch.object(lane.signals, "expect", side_effect=MemoryError),
                    pytest.raises(MemoryError),
                ):
                    pools.load_back(pages, pages)
                continue
            loading = pools.load_back(pages, pages)
        assert launches.call_count == launched
        assert len({id(loading.events_of(layer)) for layer in range(8)}) == 8
        arrived = []
        for layer in range(8):
            loading.wait(layer)
            arrived += [rows.clone() for rows in pools.device.page_rows(layer)]
        torch.cuda.synchronize()
        for layer in range(8):
            for rows, then in zip(
                pools.device.page_rows(layer), arrived[2 * layer :], strict=False
            ):
                assert torch.equal(rows, then), "too early"
        assert all(map(torch.equal, storages(pools.device), kept))


def test_layers_that_could_not_be_asked_for_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_load_back, "AHEAD_BYTES", 1)
    geometry = PageGeometry("mha", 8, 8, 128, 128, 64, torch.bfloat16)
    pools = PairedPools(
        device_pool(geometry, PAGES, "cuda"), host_pages=PAGES, layout="layer_first"
    )
    redraw(pools.device)
    pages, lane = torch.randperm(PAGES), pools._back_lane
    pools.backup(pages, pages).wait()
    kept = [rows.clone() for rows in storages(pools.device)]
    for rows in storages(pools.device):
        rows.fill_(POISON)
    loading = pools.load_back(pages, pages)
    for act in (lambda: loading.wait(4), loading.done, lambda: pools.load_back(pages, pages)):
        assert not loading.asked
        with (
            mock.patch.object(lane, "copy_stretches", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            act()
    loading.wait(7)
    torch.cuda.current_stream().synchronize()
    assert all(map(torch.equal, storages(pools.device), kept))


@pytest.mark.parametrize(("page_size", "ahead"), [(16, 1 << 30), (128, 1)])
def test_bytes_are_exact_beside_a_running_model_and_another_thread(
    monkeypatch: pytest.MonkeyPatch, page_size: int, ahead: int
) -> None:
    """Backups and load-backs of distinct pages from two threads, matrix products meanwhile; large
    pages are asked for layer by layer as the model waits for them."""
    monkeypatch.setattr(cuda_load_back, "AHEAD_BYTES", ahead)
    geometry = PageGeometry("mha", 8, 4, 128, 128, page_size, torch.bfloat16)
    left, right = torch.randn(2, 2048, 2048, device="cuda", dtype=torch.bfloat16).unbind()
    failures: list[str] = []
    made = [
        PairedPools(device_pool(geometry, PAGES, "cuda"), host_pages=PAGES, layout=each)
        for each in LAYOUTS
    ]
    for pools in made:
        redraw(pools.device)
    torch.cuda.synchronize()

    def work(pools: PairedPools) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            pool = pools.device
            kept = on_cpu(pool)
            for _ in range(12):
                source, middle = torch.randperm(PAGES)[:12], torch.randperm(PAGES)[:12]
                moved = pools.backup(source, middle)
                for _ in range(4):
                    torch.mm(left, right)
                moved.wait()
                for layer in range(8):
                    for rows in pool.page_rows(layer):
                        rows[source.cuda()] = POISON
                loading = pools.load_back(middle, source)
                assert loading.asked is (ahead > 1 or pools.host.layout == "page_first")
                for layer in range(8):
                    loading.wait(layer)
                    torch.mm(left, right)
            torch.cuda.current_stream().synchronize()
            if not all(map(torch.equal, storages(on_cpu(pool)), storages(kept))):
                failures.append(pools.host.layout)

    threads = [threading.Thread(target=work, args=(pools,)) for pools in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures


def test_indices_on_the_device_are_taken_too() -> None:
    geometry = PageGeometry("mla", 2, 1, 64, 0, 4, torch.uint8)
    pool, host = device_pool(geometry, 8, "cuda"), HostPool(geometry, 8)
    redraw(pool)
    backup(pool, host, slots([3, 1]).cuda(), slots([0, 6])).wait()
    assert host_page(host, 6) == page_bytes(on_cpu(pool), 1, host.order)


def test_a_driver_without_batches_copies_one_by_one() -> None:
    with mock.patch("hicache_storage.pools.driver.has", return_value=False):
        for layout in LAYOUTS:
            geometry = PageGeometry("mla", 3, 1, 576, 0, 16, torch.bfloat16)
            Twins(geometry, 20, layout).check("copy_engine", 12)


def test_without_triton_one_line_says_so_and_pages_still_move(
    caplog: pytest.LogCaptureFixture,
) -> None:
    movers.cuda_mover.cache_clear()
    with (
        caplog.at_level(logging.WARNING),
        mock.patch("importlib.util.find_spec", return_value=None),
    ):
        assert isinstance(movers.cuda_mover(), movers.TorchMover)
        movers.cuda_mover()
    movers.cuda_mover.cache_clear()
    assert [record.message for record in caplog.records if "triton" in record.message] != []
    assert len(caplog.records) == 1


def test_a_call_that_fails_midway_leaves_no_copy_under_way() -> None:
    """A kernel has the first pages by then."""
    geometry = PageGeometry("mha", 8, 8, 128, 128, 64, torch.bfloat16)
    pools = PairedPools(device_pool(geometry, PAGES, "cuda"), host_pages=PAGES)
    fill(pools.device, 1)
    poison(pools.host)
    lane = pools._out_lane
    with (
        mock.patch.object(lane, "half", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        pools.backup(torch.arange(PAGES), torch.arange(PAGES))
    after = pools.host._memory.tensor.clone()
    torch.cuda.synchronize()
    assert torch.equal(after, pools.host._memory.tensor)
    assert 0 < (after == POISON).sum() < len(after), "some pages have come"
    pools.backup(torch.arange(PAGES), torch.arange(PAGES)).wait()
    assert set(host_page(pools.host, PAGES - 1)) == {1}


def test_copies_are_refused_while_the_current_stream_is_captured() -> None:
    """Also the first ones of a device, for which no lane is made then: the capture goes on."""
    pools = small_pools()
    lanes.shared_lane.cache_clear()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out.add_(1)
        with pytest.raises(ConfigError, match="captured into a CUDA graph"):
            pools.backup(slots([0]), slots([0]))
        with pytest.raises(ConfigError, match="captured into a CUDA graph"):
            pools.load_back(slots([0]), slots([0]))
        with pytest.raises(ConfigError, match="captured into a CUDA graph"):
            backup(pools.device, pools.host, slots([0]), slots([0]))
        with pytest.raises(ConfigError, match="captured into a CUDA graph"):
            load_back(pools.host, pools.device, slots([0]), slots([0]))
        out.add_(1)
    graph.replay()
    assert out.tolist() == [2.0] * 4
    pools.backup(slots([0]), slots([0])).wait()


def test_a_replayed_graph_reads_what_was_loaded_before_it() -> None:
    pools = small_pools()
    rows, out = pools.device.layer_tensors(2)[0], torch.zeros((), dtype=torch.int64, device="cuda")
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        out.copy_(rows[:4].sum())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(rows[:4].sum())
    loading = pools.load_back(slots([1]), slots([0]))
    for layer in range(loading.layers):
        loading.wait(layer)
    graph.replay()
    assert int(out) == POISON * 256


def test_copies_go_on_while_another_thread_captures_a_graph() -> None:
    """With a capture that watches its own thread alone, as engines with worker threads use."""
    pools = small_pools()
    captured, go_on = threading.Event(), threading.Event()
    out = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            out.add_(1)
            captured.set()
            go_on.wait(60)

    thread = threading.Thread(target=capture)
    torch.cuda.synchronize()
    thread.start()
    assert captured.wait(60)
    pools.backup(slots([0]), slots([3])).wait()
    pools.load_back(slots([3]), slots([1])).synchronize()
    go_on.set()
    thread.join(60)
    graph.replay()
    assert out.tolist() == [1.0] * 4
