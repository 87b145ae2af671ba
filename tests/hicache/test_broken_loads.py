"""Load-backs whose later layers can't be asked for: nobody is given pages that never came."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hicache.held_copies import Device, held_copies
from hicache.rig import Rig, chain


@pytest.fixture
def device() -> Iterator[Device]:
    with held_copies(1, kernels=False) as device:
        yield device


@contextlib.contextmanager
def refusing(device: Device) -> Iterator[None]:
    """CUDA takes no copy meanwhile."""
    with contextlib.ExitStack() as stack:
        for lane in device.lanes:
            for copy in ("copy", "copy_stretches"):
                refused = RuntimeError("refused")
                stack.enter_context(mock.patch.object(lane, copy, side_effect=refused))
        yield


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
    device: Device, rig: Any
) -> None:
    hashes = chain(3)
    one = on_the_host(rig, hashes)
    lease = one.cache.acquire("r", hashes)
    assert lease.from_host == 3
    assert not lease.loading.asked
    with refusing(device):
        for act in (
            lambda: lease.loading.wait(1),
            lambda: one.cache.acquire("s", hashes),
            lambda: one.cache.release(lease),
        ):
            with pytest.raises(RuntimeError, match="refused"):
                act()
    again = one.cache.acquire("s", hashes)
    assert again.from_device == 3
    one.check(again)
    one.cache.release(lease)
    one.cache.release(again)


def test_an_acquire_that_fails_locks_no_page(device: Device, rig: Any) -> None:
    """Here since what an earlier load-back left can't be asked for."""
    first, second = chain(2), chain(2, "q")
    one = on_the_host(rig, first, second)
    lease = one.cache.acquire("r", first)
    with refusing(device), pytest.raises(RuntimeError, match="refused"):
        one.cache.acquire("s", second)
    nodes = [one.cache._tree.get(page_hash) for page_hash in second]
    assert [(node.device_locks, node.host_locks) for node in nodes if node] == [(0, 0)] * 2
    one.cache.release(lease)
    pages = one.cache.allocate(4)
    assert pages is not None, "pages of a lease that nobody has"
    one.cache.free(pages)
    again = one.cache.acquire("s", second)
    assert again.from_host == 2
    one.check(again)
    one.cache.release(again)


def test_pages_on_their_way_to_one_request_come_before_those_of_the_next(
    device: Device, rig: Any
) -> None:
    hashes = chain(3)
    one = on_the_host(rig, hashes)
    first, second = one.cache.acquire("r", hashes), one.cache.acquire("s", hashes)
    assert (first.from_host, second.from_device) == (3, 3)
    one.check(second)
    one.cache.release(second)
    one.cache.release(first)
