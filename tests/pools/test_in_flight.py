"""Copies wait for those that share a slot with them, and for no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hicache.held_copies import held_copies
from pools.pool_cases import MHA, device_pool, fill_random, host_page, page_bytes, slots

from hicache_storage.pools.in_flight import InFlight
from hicache_storage.pools.paired import PairedPools


class Copy:
    """Its two events are itself."""

    def __init__(self, name: str, *, asked: bool = True) -> None:
        self.name = name
        self.asked = asked
        self.over = False

    @property
    def events(self) -> tuple[Any, ...]:
        self.asked = True
        return self, self

    def done(self) -> bool:
        assert self.asked, "to know it, all must be asked for"
        return self.over


def shared(copies: InFlight, on_device: object, in_host: object) -> list[str]:
    """The names of copies all of whose events are given."""
    names = [event.name for event in copies.sharing(on_device, in_host)]
    assert names[::2] == names[1::2]
    return names[::2]


@pytest.mark.parametrize(
    ("on_device", "in_host", "waits"),
    [
        ([0, 5], [8, 9], True),
        ([0, 1], [9, 3], True),
        ([2, 6], [4, 7], True),
        ([0, 1], [8, 9], False),
        ([3, 4], [5, 6], False),
        ([], [], False),
    ],
)
def test_a_shared_slot_at_either_end_is_waited_for(
    on_device: list[int], in_host: list[int], waits: bool
) -> None:
    copies = InFlight()
    copies.add(Copy("first"), slots([5, 2]), slots([3, 4]))
    assert shared(copies, slots(on_device), slots(in_host)) == (["first"] if waits else [])


def test_what_is_done_is_forgotten() -> None:
    copies, first, second = InFlight(), Copy("first"), Copy("second")
    copies.add(first, slots([1]), slots([1]))
    copies.add(second, slots([1]), slots([2]))
    assert shared(copies, slots([1]), slots([7])) == ["first", "second"]
    first.over = True
    assert shared(copies, slots([1]), slots([7])) == ["second"]
    copies.add(Copy("third"), slots([9]), slots([9]))
    assert len(copies._moving) == 2


def test_the_callers_lists_may_change_meanwhile() -> None:
    copies, pages = InFlight(), slots([1])
    copies.add(Copy("first"), pages, pages)
    pages.fill_(6)
    assert shared(copies, slots([1]), slots([0])) == ["first"]


@pytest.mark.parametrize("wrong", [None, [1], torch.tensor([1.0]), slots([-1])])
def test_what_is_no_list_of_slots_is_left_to_the_copy_to_refuse(wrong: object) -> None:
    copies = InFlight()
    copies.add(Copy("first"), slots([1]), slots([1]))
    assert shared(copies, wrong, slots([1])) == []


def test_a_copy_is_asked_for_in_full_once_another_must_wait_for_it() -> None:
    """And not to know whether it is done."""
    copies, later = InFlight(), Copy("later", asked=False)
    copies.add(later, slots([1]), slots([1]))
    copies.add(Copy("other"), slots([2]), slots([2]))
    assert shared(copies, slots([2]), slots([7])) == ["other"]
    assert not later.asked
    assert shared(copies, slots([7]), slots([1])) == ["later"]
    assert later.asked


@pytest.mark.parametrize("seed", range(20))
def test_copies_the_other_way_that_share_a_slot_come_first(seed: int) -> None:
    with held_copies(seed, kernels=False) as device:
        pools = PairedPools(device_pool(MHA, 4), host_pages=4, layout="layer_first")
        fill_random(pools.device, seed)
        first = page_bytes(pools.device, 0, pools.host.order)
        page = [slots([i]) for i in range(4)]
        pools.backup(page[0], page[0])
        loading = pools.load_back(page[0], page[3])
        moving = pools.backup(page[3], page[1])
        out, back = (bool(lane.link.work) for lane in device.lanes)
        assert out
        assert back, "each way has a lane of its own"
        moving.wait()
        loading.synchronize()
        assert page_bytes(pools.device, 3, pools.host.order) == first
        assert host_page(pools.host, 1) == first
