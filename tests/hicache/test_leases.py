"""Leases: what a request gets, hands over and gives back; wrong use is refused whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hicache.rig import Rig, branch, chain

from hicache_storage import HiCacheStorageError, InvalidKey, PageSizeMismatch

MakeRig = Callable[..., Rig]


def test_a_request_gets_its_longest_prefix_and_computes_the_rest(rig: MakeRig) -> None:
    one, trunk = rig(store=False), chain(3)
    one.keep(branch(trunk, 2, "a"))
    lease = one.cache.acquire("r", branch(trunk, 2, "b"))
    assert lease.hashes == trunk
    assert (lease.from_device, lease.from_host, lease.from_storage) == (3, 0, 0)
    assert len(lease) == len(lease.device_indices) == 3
    one.cache.release(lease)
    one.close()


def test_two_requests_that_computed_the_same_pages_end_up_with_one_copy(rig: MakeRig) -> None:
    one, hashes = rig(store=False), chain(4)
    leases = [one.cache.acquire(name, hashes) for name in "ab"]
    for lease in leases:
        pages = one.cache.allocate(4)
        assert pages is not None
        one.fill(pages.tolist(), hashes)
        one.cache.insert(lease, hashes, pages)
    assert leases[0].device_indices.tolist() == leases[1].device_indices.tolist()
    assert one.pools.device_allocator.available == 28
    one.cache.release(leases[0])
    assert one.cache.allocate(29) is None
    one.check(leases[1])
    one.cache.release(leases[1])
    one.close()


def test_pages_may_be_handed_over_bit_by_bit(rig: MakeRig) -> None:
    one, hashes = rig(), chain(6)
    lease = one.cache.acquire("r", hashes)
    for count in (1, 3, 3, 6):
        fresh = one.cache.allocate(count - len(lease))
        assert fresh is not None
        one.fill(fresh.tolist(), hashes[len(lease) : count])
        one.cache.insert(lease, hashes[:count], torch.cat([lease.device_indices, fresh]))
        assert len(lease) == count
    one.cache.insert(lease, hashes[:2], lease.device_indices[:2])
    assert len(lease) == 6
    one.check(lease)
    one.cache.release(lease)
    one.close()


def test_a_computed_page_takes_the_place_of_one_that_only_the_host_has(rig: MakeRig) -> None:
    one, hashes = rig(store=False, device_pages=8), chain(4)
    one.keep(hashes)
    lease = one.cache.acquire("r", [])
    pages = one.cache.allocate(8)
    assert pages is not None
    one.cache.free(pages[4:])
    one.fill(pages[:4].tolist(), hashes)
    one.cache.insert(lease, hashes, pages[:4])
    assert lease.device_indices.tolist() == pages[:4].tolist()
    one.cache.release(lease)
    one.close()


def test_a_released_lease_may_be_released_again_and_not_be_used(rig: MakeRig) -> None:
    one, hashes = rig(store=False), chain(2)
    lease = one.serve(hashes)
    other = one.cache.acquire("other", hashes)
    one.cache.release(lease)
    one.cache.release(lease)
    assert one.cache.allocate(31) is None, "the second release let go of the other's lock"
    with pytest.raises(HiCacheStorageError, match="released already"):
        one.cache.insert(lease, hashes, lease.device_indices)
    one.cache.release(other)
    one.close()


@pytest.mark.parametrize(
    ("count", "hashes", "error", "match"),
    [
        pytest.param(3, chain(2), PageSizeMismatch, "2 page hashes but 3", id="more pages"),
        pytest.param(2, chain(3), PageSizeMismatch, "3 page hashes but 2", id="fewer pages"),
        pytest.param(0, chain(3), PageSizeMismatch, "3 page hashes but 0", id="no pages"),
        pytest.param(3, chain(3, "x"), InvalidKey, "begin as its lease", id="another request"),
        pytest.param(2, chain(3)[1:], InvalidKey, "begin as its lease", id="only the new ones"),
        pytest.param(3, [*chain(2), chain(3, "kept")[1]], InvalidKey, "chained", id="not chained"),
    ],
)
def test_pages_that_do_not_fit_their_hashes_are_refused_and_nothing_changes(
    rig: MakeRig, count: int, hashes: list[str], error: type[Exception], match: str
) -> None:
    one = rig(store=False)
    one.keep(chain(3, "kept"))
    lease = one.serve(chain(2))
    pages = one.cache.allocate(5)
    assert pages is not None
    before = one.cache.stats()
    with pytest.raises(error, match=match):
        one.cache.insert(lease, hashes, pages[:count])
    assert one.cache.stats() == before
    one.check(lease)
    one.cache.free(pages)
    one.cache.release(lease)
    one.close()


def test_a_page_that_is_not_the_requests_own_is_refused(rig: MakeRig) -> None:
    one = rig(store=False)
    other = one.serve(chain(2, "other"))
    lease = one.cache.acquire("r", [])
    (page,) = one.cache.allocate(1) or ()
    for pages, match in (
        ([int(page), int(page)], "stands for two"),
        ([int(page), int(other.device_indices[0])], "belongs to another page"),
        ([int(page), 32], "not one of the pool's 32"),
        ([-1, int(page)], "not one of the pool's 32"),
    ):
        with pytest.raises(PageSizeMismatch, match=match):
            one.cache.insert(lease, chain(2), torch.tensor(pages))
    assert len(lease) == 0
    one.cache.free(torch.tensor([int(page)]))
    one.cache.release(lease)
    one.cache.release(other)
    one.close()


def test_pages_of_the_cache_can_not_be_freed_under_it(rig: MakeRig) -> None:
    one = rig(store=False)
    lease = one.serve(chain(2))
    pages = one.cache.allocate(1)
    assert pages is not None
    with pytest.raises(PageSizeMismatch, match="belongs to the cache"):
        one.cache.free(torch.cat([pages, lease.device_indices[:1]]))
    one.cache.free(pages)
    with pytest.raises(PageSizeMismatch, match="free already"):
        one.cache.free(pages)
    one.check(lease)
    one.cache.release(lease)
    one.close()


def test_an_engine_that_drops_the_last_page_asks_for_one_page_less(rig: MakeRig) -> None:
    """EAGLE and MTP compute the last matched page again: fewer pages are loaded than exist."""
    hashes = chain(8)
    first = rig()
    first.keep(hashes)
    one = rig(backend=first.backend)
    one.cache.prefetch("r", hashes)
    one.idle()
    lease = one.cache.acquire("r", hashes[:-1])
    stats = one.cache.stats()
    assert (len(lease), lease.from_storage) == (7, 7)
    assert (stats.found_pages, stats.loaded_pages, stats.storage_hits) == (8, 8, 7)
    one.cache.release(lease)
    one.cache.release(one.serve(hashes))
    one.close()
