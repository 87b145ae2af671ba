"""Load-backs whose later layers can't be asked for: nobody is given pages that never came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hicache.rig import Rig, chain
from pools.simulated_lane import Event, SimulatedLane

from hicache_storage.pools import cuda_load_back, strategy
from hicache_storage.pools.cuda_load_back import Loading
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.routes import routes
from hicache_storage.pools.transfer import LayerEvents, _in_charge


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedLane]:
    """What all load-backs take, a layer at a time."""
    for name in ("_STEP_BYTES", "DIRECT_STRETCH", "LOAD_ROW", "LOAD_STRETCH"):
        monkeypatch.setattr(strategy, name, 1)
    strategy._load_steps.cache_clear()
    monkeypatch.setattr(cuda_load_back, "AHEAD_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    lane = SimulatedLane(1 << 20, kernels=False, seed=1)
    lane.settle = lane.run  # type: ignore[method-assign]
    monkeypatch.setattr(Event, "synchronize", lambda event: lane.run(), raising=False)

    def load_back(pools: PairedPools, host: Any, device: Any) -> LayerEvents:
        pair = routes(pools.device, pools.host)
        pair.pinned = True
        with _in_charge(lane):
            loading = Loading([pair], host.numpy(), device.numpy(), lane, "copy_engine")
        return LayerEvents([(pools.device, pools.host)], loading.layers, loading)

    monkeypatch.setattr(PairedPools, "load_back", load_back)
    yield lane
    strategy._load_steps.cache_clear()


def refusing(lane: SimulatedLane) -> Any:
    refused = RuntimeError("refused")
    return mock.patch.multiple(
        lane,
        copy=mock.Mock(side_effect=refused),
        copy_stretches=mock.Mock(side_effect=refused),
    )


def on_the_host(rig: Any, *prompts: list[str]) -> Rig:
    """With pages of these prompts in the host pool alone."""
    one: Rig = rig(store=False, draft=False, device_pages=sum(map(len, prompts)))
    for hashes in prompts:
        one.keep(hashes)
    pages = one.cache.allocate(sum(map(len, prompts)))
    assert pages is not None
    one.cache.free(pages)
    one.dirty()
    return one


def test_a_load_back_that_failed_is_completed_before_anybody_else_is_given_its_pages(
    rig: Any, lane: SimulatedLane
) -> None:
    hashes = chain(3)
    one = on_the_host(rig, hashes)
    lease = one.cache.acquire("r", hashes)
    assert lease.from_host == 3
    assert not lease.loading.asked
    with refusing(lane):
        for act in (
            lambda: lease.loading.events_of(1),
            lambda: one.cache.acquire("s", hashes),
            lambda: one.cache.release(lease),
        ):
            with pytest.raises(RuntimeError, match="refused"):
                act()
    again = one.cache.acquire("s", hashes)
    assert again.from_device == 3
    again.loading.synchronize()
    one.check(again)
    one.cache.release(lease)
    one.cache.release(again)


def test_an_acquire_that_fails_locks_no_page(rig: Any, lane: SimulatedLane) -> None:
    """Here since what an earlier load-back left can't be asked for."""
    first, second = chain(2), chain(2, "q")
    one = on_the_host(rig, first, second)
    lease = one.cache.acquire("r", first)
    with refusing(lane), pytest.raises(RuntimeError, match="refused"):
        one.cache.acquire("s", second)
    nodes = [one.cache._tree.get(page_hash) for page_hash in second]
    assert [(node.device_locks, node.host_locks) for node in nodes if node] == [(0, 0)] * 2
    one.cache.release(lease)
    pages = one.cache.allocate(4)
    assert pages is not None, "pages of a lease that nobody has"
    one.cache.free(pages)
    again = one.cache.acquire("s", second)
    assert again.from_host == 2
    again.loading.synchronize()
    one.check(again)
    one.cache.release(again)


def test_pages_on_their_way_to_one_request_come_before_those_of_the_next(
    rig: Any, lane: SimulatedLane
) -> None:
    hashes = chain(3)
    one = on_the_host(rig, hashes)
    first, second = one.cache.acquire("r", hashes), one.cache.acquire("s", hashes)
    assert (first.from_host, second.from_device) == (3, 3)
    second.loading.synchronize()
    one.check(second)
    one.cache.release(second)
    one.cache.release(first)
