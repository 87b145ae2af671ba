"""On CUDA copies run behind the calls that ask for them: no byte is read or reused too early."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hicache.rig import Rig, branch, chain
from hicache.test_hicache_stateful import CacheMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from hicache_storage.pools.lanes import Lane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MakeRig = Callable[..., Rig]
BUSY_CYCLES = 100_000_000
"""Keeps a stream busy for some 50 ms."""


class CudaMachine(CacheMachine):
    device = "cuda"


def test_random_use_on_the_device() -> None:
    run_state_machine_as_test(
        CudaMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def stall(lane: Lane | None) -> None:
    """Has whatever is asked of the lane next come late."""
    assert lane is not None
    for stream in lane.streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY_CYCLES)


def overwrite(one: Rig, pages: torch.Tensor) -> None:
    """Has the device use the pages for something else, at once."""
    indices = pages.cuda()
    for _, pool in one.halves():
        for layer in range(pool.geometry.layers):
            for rows in pool.page_rows(layer):
                rows[indices] = 0xCD


def overwritten(one: Rig, pages: torch.Tensor) -> bool:
    torch.cuda.synchronize()
    return all(
        bool((rows[pages.cuda()] == 0xCD).all())
        for _, pool in one.halves()
        for layer in range(pool.geometry.layers)
        for rows in pool.page_rows(layer)
    )


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_storage_is_not_given_bytes_that_are_still_on_their_way(rig: MakeRig, policy: str) -> None:
    one, hashes = rig(device="cuda", device_pages=8, write_policy=policy), chain(6)
    stall(one.pools._out_lane)
    lease = one.serve(hashes)
    one.cache.release(lease)
    pages = one.cache.allocate(8)
    assert pages is not None
    one.cache.free(pages)
    one.idle()
    two = rig(device="cuda", backend=one.backend)
    lease = two.fetch(hashes)
    assert (len(lease), lease.drafts) == (6, [True] * 6)
    two.cache.release(lease)
    one.close()
    two.close()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_an_evicted_page_is_copied_before_its_place_is_used_again(
    rig: MakeRig, policy: str
) -> None:
    one = rig(device="cuda", device_pages=6, store=False, write_policy=policy)
    hashes = chain(6)
    stall(one.pools._out_lane)
    one.cache.release(one.serve(hashes))
    pages = one.cache.allocate(6)
    assert pages is not None
    overwrite(one, pages)
    one.cache.free(pages)
    lease = one.cache.acquire("r", hashes)
    assert lease.from_host == 6
    one.check(lease)
    one.cache.release(lease)
    one.close()


def test_a_released_page_is_used_again_only_when_its_load_has_ended(rig: MakeRig) -> None:
    one = rig(device="cuda", device_pages=6, host_pages=6, store=False)
    hashes = chain(6)
    one.keep(hashes)
    for level in ("device", "host"):
        pages = one.cache.allocate(6)
        assert pages is not None
        one.cache.free(pages)
        stall(one.pools._back_lane)
        lease = one.cache.acquire("given up", hashes)
        assert lease.from_host == 6
        one.cache.release(lease)
        if level == "host":
            one.cache.clear()
            taken = one.pools.host_allocator.alloc(6)
            assert taken is not None
            for page in taken.tolist():
                for span in one.pools.host.spans(page):
                    span[:] = b"\xee" * len(span)
            torch.cuda.synchronize()
            for page, page_hash in zip(lease.device_indices.tolist(), hashes, strict=True):
                assert one.holds(page, page_hash, "target")
            one.pools.host_allocator.free(taken)
        else:
            pages = one.cache.allocate(6)
            assert pages is not None
            overwrite(one, pages)
            assert overwritten(one, pages)
            one.cache.free(pages)
    one.close()


def test_layers_may_be_read_as_they_arrive(rig: MakeRig) -> None:
    one = rig(device="cuda", device_pages=6, store=False)
    hashes = chain(6)
    one.keep(hashes)
    pages = one.cache.allocate(6)
    assert pages is not None
    one.cache.free(pages)
    one.dirty()
    lease = one.cache.acquire("r", hashes)
    read = []
    for layer in range(lease.loading.layers):
        lease.loading.wait(layer)
        rows = one.pools.device.page_rows(layer)
        read.append([part[lease.device_indices.cuda()].clone() for part in rows])
    one.check(lease)
    for layer, parts in enumerate(read):
        for part, rows in zip(parts, one.pools.device.page_rows(layer), strict=True):
            assert torch.equal(part, rows[lease.device_indices.cuda()])
    one.cache.release(lease)
    one.close()


def test_many_rounds_of_faulty_restores_leave_no_wrong_page(rig: MakeRig) -> None:
    luck = random.Random(6)
    prompts = [branch(chain(3, str(i % 2)), 3, str(i)) for i in range(5)]
    one = rig(device="cuda", device_pages=8, host_pages=10, write_policy="write_back")

    def fault(hook: str, keys: list[str]) -> None:
        one.backend.lose = {key for key in keys if key[:2] == "d:" and luck.random() < 0.1}

    one.backend.on = fault
    for i in range(150):
        prompt = luck.choice(prompts)
        one.cache.release(one.fetch(prompt, f"r{i}"))
        one.cache.release(one.serve(prompt))
        if luck.random() < 0.2:
            one.cache.clear()
    stats = one.cache.stats()
    assert stats.host_hits > 0
    assert stats.storage_hits > 0
    one.close()
