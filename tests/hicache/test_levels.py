"""Write policies and eviction: what is copied where, and what goes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hicache.rig import Gate, Rig, branch, chain

MakeRig = Callable[..., Rig]


def resident(rig: Rig, hashes: list[str]) -> list[str]:
    """Where each page of a prompt is: "", "d", "h" or "dh"."""
    nodes = {node.hash: node for node in rig.cache._tree}
    return [
        ""
        if page_hash not in nodes
        else "d" * (nodes[page_hash].device is not None) + "h" * (nodes[page_hash].host is not None)
        for page_hash in hashes
    ]


def squeeze(rig: Rig, pages: int) -> None:
    """Has the device give up until `pages` of its pages are free."""
    taken = rig.cache.allocate(pages)
    assert taken is not None
    rig.cache.free(taken)
    rig.idle()


def test_write_through_copies_to_host_and_storage_at_insert(rig: MakeRig) -> None:
    one, hashes = rig(write_policy="write_through"), chain(5)
    lease = one.serve(hashes)
    one.idle()
    assert resident(one, hashes) == ["dh"] * 5
    assert one.backend.stored() == {*hashes, *(f"d:{h}" for h in hashes)}
    one.cache.release(lease)
    one.close()


def test_write_through_selective_waits_for_the_hits(rig: MakeRig) -> None:
    one = rig(write_policy="write_through_selective", write_threshold=2)
    trunk = chain(2)
    one.keep(trunk)
    one.keep(branch(trunk, 2, "a"))
    assert one.backend.stored() == set()
    one.keep(branch(trunk, 2, "b"))
    assert one.backend.stored() == {*trunk, *(f"d:{h}" for h in trunk)}
    assert resident(one, branch(trunk, 2, "a")) == ["dh", "dh", "d", "d"]
    one.close()


def test_write_back_copies_only_what_the_device_gives_up(rig: MakeRig) -> None:
    one, hashes = rig(write_policy="write_back", device_pages=8), chain(4)
    one.keep(hashes)
    one.keep(hashes)
    assert one.backend.stored() == set()
    squeeze(one, 6)
    assert resident(one, hashes) == ["d", "d", "h", "h"]
    assert one.backend.stored() == {*hashes[2:], *(f"d:{h}" for h in hashes[2:])}
    one.cache.release(one.serve(hashes))
    assert one.cache.stats().host_hits == 2
    one.close()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_page_comes_back_from_the_host_with_target_and_draft(rig: MakeRig, policy: str) -> None:
    one, hashes = rig(write_policy=policy, write_threshold=1, device_pages=8), chain(6)
    for _ in range(2):
        one.keep(hashes)
    squeeze(one, 8)
    assert resident(one, hashes) == ["h"] * 6
    one.dirty()
    lease = one.cache.acquire("again", hashes)
    one.check(lease)
    assert (lease.from_device, lease.from_host, lease.from_storage) == (0, 6, 0)
    assert lease.drafts == [True] * 6
    one.cache.release(lease)
    one.close()


def test_the_least_recently_used_prompt_goes_first_from_its_end(rig: MakeRig) -> None:
    one = rig(device_pages=6, host_pages=6, store=False)
    old, new = chain(3, "old"), chain(3, "new")
    for hashes in (new, old, new):
        one.keep(hashes)
    squeeze(one, 2)
    assert resident(one, old) == ["dh", "h", "h"]
    squeeze(one, 4)
    assert resident(one, old) == ["h", "h", "h"]
    assert resident(one, new) == ["dh", "dh", "h"]
    one.close()


def test_a_hit_alone_makes_a_prompt_recent(rig: MakeRig) -> None:
    one = rig(device_pages=6, host_pages=6, store=False)
    old, new = chain(3, "old"), chain(3, "new")
    one.keep(old)
    one.keep(new)
    one.cache.release(one.cache.acquire("hit", old))
    squeeze(one, 3)
    assert resident(one, old) == ["dh"] * 3
    assert resident(one, new) == ["h"] * 3
    one.close()


def test_the_host_gives_up_ends_of_prefixes_only(rig: MakeRig) -> None:
    one = rig(device_pages=8, host_pages=4, store=False)
    old, new = chain(4, "old"), chain(2, "new")
    one.keep(old)
    squeeze(one, 8)
    one.keep(new)
    assert resident(one, old) == ["h", "h", "", ""]
    assert resident(one, new) == ["dh", "dh"]
    one.close()


def test_a_page_may_leave_the_device_and_stay_on_the_host_or_the_other_way(rig: MakeRig) -> None:
    one = rig(device_pages=8, host_pages=2, store=False)
    one.keep(chain(2, "old"))
    one.keep(chain(2, "new"))
    assert resident(one, chain(2, "old")) == ["d", "d"]
    squeeze(one, 6)
    assert resident(one, chain(2, "old")) == ["", ""]
    assert resident(one, chain(2, "new")) == ["dh", "dh"]
    squeeze(one, 8)
    assert resident(one, chain(2, "new")) == ["h", "h"]
    one.close()


def test_nothing_that_a_lease_holds_is_evicted(rig: MakeRig) -> None:
    one = rig(device_pages=8, host_pages=8, store=False)
    lease = one.serve(chain(4))
    one.keep(chain(4, "other"))
    assert one.cache.allocate(5) is None
    pages = one.cache.allocate(4)
    assert pages is not None
    one.dirty()
    one.check(lease)
    assert one.cache.allocate(1) is None
    one.cache.free(pages)
    one.cache.release(lease)
    one.close()


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_a_page_with_host_pages_behind_it_is_backed_up_before_it_goes(
    rig: MakeRig, policy: str
) -> None:
    hashes = chain(3)
    first = rig()
    first.keep(hashes)
    one = rig(backend=first.backend, write_policy=policy, write_threshold=9, device_pages=4)
    one.keep(hashes[:1])
    one.cache.prefetch("r", hashes)
    one.idle()
    one.cache.release(one.cache.acquire("r", hashes[:1]))
    assert resident(one, hashes) == ["d", "h", "h"]
    squeeze(one, 4)
    assert resident(one, hashes) == ["h", "h", "h"]
    one.close()


def test_a_page_with_host_pages_behind_it_stays_if_it_can_not_be_backed_up(rig: MakeRig) -> None:
    hashes = chain(6)
    first = rig()
    first.keep(hashes)
    one = rig(backend=first.backend, write_policy="write_back", device_pages=4, host_pages=8)
    one.keep(hashes[:1])
    one.cache.prefetch("r", hashes[:3])
    one.idle()
    one.cache.release(one.cache.acquire("r", hashes[:1]))
    gate = one.backend.on = Gate("exists")
    one.cache.prefetch("r", hashes)
    one.until(gate.entered.is_set)
    taken = one.pools.host_allocator.alloc(one.pools.host_allocator.available)
    assert taken is not None
    assert resident(one, hashes[:3]) == ["d", "h", "h"]
    assert one.cache.allocate(4) is None
    assert resident(one, hashes[:3]) == ["d", "h", "h"]
    one.pools.host_allocator.free(taken)
    gate.open()
    squeeze(one, 4)
    assert resident(one, hashes[:3]) == ["h", "h", "h"]
    one.cache.cancel_prefetch("r")
    one.close()


def test_a_full_host_costs_the_backup_and_not_the_request(rig: MakeRig) -> None:
    one = rig(device_pages=8, host_pages=2, store=False, write_policy="write_back")
    one.keep(chain(6))
    taken = one.pools.host_allocator.alloc(2)
    assert taken is not None
    pages = one.cache.allocate(8)
    assert pages is not None
    stats = one.cache.stats()
    assert (stats.dropped_pages, stats.no_host_room, stats.device_evictions) == (6, 6, 6)
    one.cache.free(pages)
    one.pools.host_allocator.free(taken)
    one.close()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_copy_that_fails_leaves_every_page_where_it_was(
    rig: MakeRig, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig(device_pages=4, host_pages=8, store=False, write_policy=policy)
    hashes = chain(4)
    lease = one.cache.acquire("r", hashes)
    pages = one.cache.allocate(4)
    assert pages is not None
    one.fill(pages.tolist(), hashes)

    def fail(*_: Any) -> None:
        raise RuntimeError("device fault")

    with monkeypatch.context() as patch:
        patch.setattr(one.pools, "backup", fail)
        if policy == "write_through":
            with pytest.raises(RuntimeError, match="device fault"):
                one.cache.insert(lease, hashes, pages)
        else:
            one.cache.insert(lease, hashes, pages)
            one.cache.release(lease)
            with pytest.raises(RuntimeError, match="device fault"):
                one.cache.allocate(3)
    assert resident(one, hashes) == ["d"] * 4
    assert one.pools.host_allocator.available == 8
    one.cache.release(lease)
    one.cache.release(one.serve(hashes))
    squeeze(one, 4)
    assert resident(one, hashes) == ["h"] * 4
    one.close()


def test_clear_forgets_all_but_what_is_held(rig: MakeRig) -> None:
    one = rig(device_pages=8, host_pages=8)
    lease = one.serve(chain(2))
    one.keep(chain(3, "other"))
    one.cache.clear()
    assert resident(one, chain(2)) == ["d", "d"]
    assert resident(one, chain(3, "other")) == ["", "", ""]
    one.check(lease)
    one.cache.release(lease)
    one.close()


def test_load_back_takes_what_device_pages_can_be_had(rig: MakeRig) -> None:
    one = rig(device_pages=6, host_pages=8, store=False)
    hashes = chain(6)
    one.keep(hashes)
    squeeze(one, 6)
    held = one.cache.allocate(2)
    assert held is not None
    lease = one.cache.acquire("r", hashes)
    assert len(lease) == 4
    one.check(lease)
    one.cache.free(held)
    one.cache.release(lease)
    again = one.cache.acquire("r", hashes)
    assert (again.from_device, again.from_host) == (4, 2)
    one.cache.release(again)
    one.close()


def test_allocated_pages_are_int64_on_the_cpu(rig: MakeRig) -> None:
    one = rig(store=False)
    pages = one.cache.allocate(3)
    assert pages is not None
    assert (pages.dtype, pages.shape, pages.device.type) == (torch.int64, (3,), "cpu")
    empty = one.cache.allocate(0)
    assert empty is not None
    assert empty.shape == (0,)
    one.cache.free(pages)
    one.close()
