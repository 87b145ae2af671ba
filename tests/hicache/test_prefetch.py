"""Prefetch: how long it is waited for, when it isn't made, and that only what came counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hicache.rig import Gate, Rig, branch, chain

from hicache_storage import BackendTimeout, PageSizeMismatch
from hicache_storage.hicache.prefetch import PrefetchOperation
from hicache_storage.hicache.storage_threads import BATCH_PAGES

MakeRig = Callable[..., Rig]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def second(rig: MakeRig, hashes: list[str], **options: Any) -> Rig:
    """A rig whose storage has `hashes`, and whose memory has nothing."""
    pages = max(32, len(hashes))
    first = rig(device_pages=pages, host_pages=pages, storage={"backup_limit_pages": pages})
    first.keep(hashes)
    first.backend.calls.clear()
    return rig(backend=first.backend, **{"host_pages": 2 * pages, "device_pages": pages} | options)


def test_wait_complete_waits_for_the_last_page(rig: MakeRig) -> None:
    hashes = chain(4)
    one = second(rig, hashes, prefetch_policy="wait_complete")
    gate = one.backend.on = Gate("batch_get")
    assert one.cache.prefetch("r", hashes)
    one.until(gate.entered.is_set)
    assert not one.cache.prefetch_ready("r")
    gate.open()
    one.idle()
    assert one.cache.prefetch_ready("r")
    lease = one.cache.acquire("r", hashes)
    assert lease.from_storage == 4
    one.cache.release(lease)
    one.settle()


def test_best_effort_is_always_ready_and_ends_when_the_request_starts(rig: MakeRig) -> None:
    hashes = chain(BATCH_PAGES + 6)
    one = second(rig, hashes, prefetch_policy="best_effort")
    gate = one.backend.on = Gate("batch_get", hashes[-1])
    one.cache.prefetch("r", hashes)
    assert one.cache.prefetch_ready("r")
    one.until(gate.entered.is_set)
    assert one.cache.prefetch_ready("r")
    lease = one.cache.acquire("r", hashes)
    assert (len(lease), lease.from_storage) == (BATCH_PAGES, BATCH_PAGES)
    one.check(lease)
    held = one.cache.stats().prefetch_held_pages
    assert held == 6
    gate.open()
    one.cache.release(lease)
    one.settle()
    assert one.cache.stats().loaded_pages == BATCH_PAGES + 6
    assert one.cache.stats().published_pages == BATCH_PAGES


def test_timeout_waits_for_its_base_and_a_share_for_each_page(rig: MakeRig) -> None:
    clock, hashes = Clock(), chain(8)
    one = second(
        rig,
        hashes,
        prefetch_policy="timeout",
        clock=clock,
        storage={"prefetch_timeout_base_s": 2.0, "prefetch_timeout_per_page_s": 0.5},
    )
    gate = one.backend.on = Gate("batch_get")
    one.cache.prefetch("r", hashes)
    one.until(gate.entered.is_set)
    clock.now_s = 5.9
    assert not one.cache.prefetch_ready("r")
    clock.now_s = 6.0
    assert one.cache.prefetch_ready("r")
    lease = one.cache.acquire("r", hashes)
    assert len(lease) == 0
    gate.open()
    one.cache.release(lease)
    one.settle()


def test_a_finished_prefetch_is_ready_before_its_timeout(rig: MakeRig) -> None:
    clock, hashes = Clock(), chain(2)
    one = second(rig, hashes, prefetch_policy="timeout", clock=clock)
    one.cache.prefetch("r", hashes)
    one.idle()
    assert one.cache.prefetch_ready("r")
    one.cache.cancel_prefetch("r")
    one.settle()


@pytest.mark.parametrize(
    ("stored", "free_host", "threshold", "counted"),
    [
        pytest.param(8, 64, 9, "below_threshold", id="request too small"),
        pytest.param(3, 64, 4, "below_threshold", id="too few are stored"),
        pytest.param(8, 0, 1, "declined", id="no host memory"),
        pytest.param(8, 3, 4, "declined", id="too little host memory"),
    ],
)
def test_a_declined_prefetch_gives_nothing_whatever_the_lookup_found(
    rig: MakeRig, stored: int, free_host: int, threshold: int, counted: str
) -> None:
    hashes = chain(8)
    one = second(rig, hashes, storage={"prefetch_threshold_pages": threshold})
    one.backend.forget(*hashes[stored:])
    taken = one.pools.host_allocator.alloc(64 - free_host)
    assert taken is not None
    one.cache.prefetch("r", hashes)
    one.idle()
    assert one.cache.prefetch_ready("r")
    lease = one.cache.acquire("r", hashes)
    stats = one.cache.stats()
    assert (len(lease), stats.loaded_pages, getattr(stats, counted)) == (0, 0, 1)
    assert stats.found_pages == (stored if threshold < 9 else 0)
    assert one.backend.asked("batch_get") == []
    one.cache.release(lease)
    one.pools.host_allocator.free(taken)
    one.settle()


def test_a_prefetch_beyond_the_limit_is_declined_until_others_end(rig: MakeRig) -> None:
    hashes = chain(8)
    one = second(rig, hashes, storage={"prefetch_limit_pages": 2})
    one.cache.prefetch("a", hashes)
    one.idle()
    assert not one.cache.prefetch("b", hashes)
    stats = one.cache.stats()
    assert (stats.declined, stats.prefetch_held_pages) == (1, 2)
    one.cache.cancel_prefetch("a")
    assert one.cache.prefetch("b", hashes)
    one.cache.cancel_prefetch("b")
    one.settle()


def test_prefetches_together_hold_no_more_than_their_limit(rig: MakeRig) -> None:
    hashes = chain(12)
    one = second(rig, hashes, storage={"prefetch_limit_pages": 8})
    one.cache.prefetch("a", hashes[:6])
    one.idle()
    one.cache.prefetch("b", hashes)
    one.idle()
    assert one.cache.stats().prefetch_held_pages == 8
    lease = one.cache.acquire("b", hashes)
    assert len(lease) == 2
    one.cache.release(lease)
    one.cache.cancel_prefetch("a")
    one.settle()


def test_a_missing_first_page_makes_the_rest_useless_and_is_shown(rig: MakeRig) -> None:
    hashes = chain(10)
    one = second(rig, hashes)
    one.backend.forget(hashes[0])
    lease = one.fetch(hashes)
    stats = one.cache.stats()
    assert len(lease) == 0
    assert (stats.lookups, stats.first_page_missing, stats.found_pages) == (1, 1, 0)
    one.cache.release(lease)
    one.settle()


def test_pages_in_memory_are_not_asked_for(rig: MakeRig) -> None:
    hashes = chain(6)
    one = second(rig, hashes)
    one.cache.release(one.fetch(hashes[:4]))
    one.backend.calls.clear()
    lease = one.fetch(hashes, "s")
    assert (lease.from_device, lease.from_storage) == (4, 2)
    assert set(one.backend.asked("exists")) == set(hashes[4:])
    one.cache.release(lease)
    assert not one.cache.prefetch("t", hashes)
    assert one.cache.stats().resident == 1
    one.settle()


@pytest.mark.parametrize("fault", ["miss", "raises", "times out", "not a list"])
def test_a_read_that_fails_after_a_hit_is_tried_once_for_a_request(
    rig: MakeRig, fault: str
) -> None:
    hashes = chain(4)
    one = second(rig, hashes)

    def fail(hook: str, keys: list[str]) -> Any:
        if hook != "batch_get":
            return None
        if fault == "miss":
            return [False] * len(keys)
        if fault == "raises":
            raise OSError(5, "told to")
        if fault == "times out":
            raise BackendTimeout("told to", backend="told", operation=hook)
        return "nothing"

    one.backend.on = fail
    assert one.cache.prefetch("r", hashes)
    one.idle()
    for _ in range(20):
        assert not one.cache.prefetch("r", hashes)
        assert one.cache.prefetch_ready("r")
    one.idle()
    lease = one.cache.acquire("r", hashes)
    stats = one.cache.stats()
    assert (len(lease), stats.found_pages, stats.loaded_pages) == (0, 4, 0)
    assert len(one.backend.asked("batch_get")) == 4
    one.cache.release(lease)
    one.settle()


@pytest.mark.parametrize("hit", [0, 2, 4])
def test_pages_behind_the_first_miss_are_not_used(rig: MakeRig, hit: int) -> None:
    hashes = chain(5)
    one = second(rig, hashes)
    one.backend.lose = {hashes[hit]}
    lease = one.fetch(hashes)
    assert len(lease) == hit
    assert one.cache.stats().loaded_pages == hit
    one.cache.release(lease)
    one.settle()


def test_a_run_that_ends_in_one_batch_is_not_followed_into_the_next(rig: MakeRig) -> None:
    hashes = chain(3 * BATCH_PAGES)
    one = second(rig, hashes)
    one.backend.lose = {hashes[BATCH_PAGES + 3]}
    lease = one.fetch(hashes)
    assert len(lease) == BATCH_PAGES + 3
    assert hashes[2 * BATCH_PAGES] not in one.backend.asked("batch_get")
    assert max(len(keys) for _, keys in one.backend.calls) == BATCH_PAGES
    one.cache.release(lease)
    one.settle()


def test_small_requests_do_not_wait_for_a_big_one(rig: MakeRig) -> None:
    big = chain(5 * BATCH_PAGES)
    small = [chain(2, f"small {i}") for i in range(4)]
    one = second(rig, big, storage={"prefetch_threads": 1}, host_pages=2000)
    other = rig(backend=one.backend)
    for hashes in small:
        other.keep(hashes)
    first = one.backend.on = Gate("batch_get", big[0])
    one.cache.prefetch("big", big)
    one.until(first.entered.is_set)
    for i, hashes in enumerate(small):
        one.cache.prefetch(f"small {i}", hashes)
    second_batch = one.backend.on = Gate("batch_get", big[BATCH_PAGES])
    first.open()
    # The only worker reaches the second batch after the small requests' lookups; polling then
    # gives each of them its pages.
    one.until(second_batch.entered.is_set)
    for i in range(4):
        one.cache.prefetch_ready(f"small {i}")
    second_batch.open()
    one.idle()
    reads = [keys[0] for hook, keys in one.backend.calls if hook == "batch_get"]
    last_small = max(reads.index(hashes[0]) for hashes in small)
    assert last_small < reads.index(big[-BATCH_PAGES])
    one.cache.acquire("big", [])
    for i in range(4):
        one.cache.cancel_prefetch(f"small {i}")
    one.settle()


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [0, 0], [5, 6, 5]])
def test_more_host_pages_than_hashes_are_refused_before_any_byte_moves(
    rig: MakeRig, slots: list[int]
) -> None:
    one = rig()
    assert one.cache._storages.current is not None
    operation = PrefetchOperation(
        one.cache._storages.current,
        one.pools,
        hashes=chain(3),
        anchor=one.cache._tree.root,
        prefix=[],
        started_s=0.0,
    )
    with pytest.raises(PageSizeMismatch, match="can't be read into"):
        operation.give(slots)
    assert operation.held == {}
    assert not operation.fetching


def test_a_prefetch_whose_beginning_is_gone_adds_nothing(rig: MakeRig) -> None:
    hashes = chain(4)
    one = second(rig, hashes, write_policy="write_back")
    one.keep(hashes[:2])
    one.cache.prefetch("r", hashes)
    one.idle()
    one.cache.clear()
    lease = one.cache.acquire("r", hashes)
    assert len(lease) == 0
    one.idle()
    stats = one.cache.stats()
    assert (stats.loaded_pages, stats.published_pages, stats.host_pages) == (2, 0, 0)
    one.cache.release(lease)
    one.settle()


def test_a_hash_of_another_prefix_ends_what_is_published(rig: MakeRig) -> None:
    """Hashes that are not chained name pages that the tree has elsewhere."""
    hashes = chain(3)
    one = second(rig, hashes, draft=False)
    other = rig(backend=one.backend, draft=False)
    other.keep(chain(1, "other"))
    lease = one.serve(hashes)
    one.idle()
    one.cache.release(one.fetch([*chain(1, "other"), hashes[1], hashes[2]], "mixed"))
    assert one.cache.stats().published_pages == 1
    one.check(lease)
    one.cache.release(lease)
    one.settle()


def test_a_page_computed_meanwhile_is_kept_once(rig: MakeRig) -> None:
    hashes = chain(6)
    one = second(rig, hashes)
    one.cache.prefetch("r", hashes)
    one.idle()
    one.cache.release(one.serve(hashes[:4], "faster"))
    one.idle()
    lease = one.cache.acquire("r", hashes)
    assert (lease.from_device, lease.from_storage) == (4, 2)
    one.check(lease)
    one.cache.release(lease)
    one.settle()


def test_branches_share_what_was_fetched_for_one(rig: MakeRig) -> None:
    trunk = chain(3)
    one = second(rig, branch(trunk, 2, "a"))
    one.cache.release(one.fetch(branch(trunk, 2, "a")))
    lease = one.cache.acquire("b", branch(trunk, 2, "b"))
    assert lease.hashes == trunk
    one.cache.release(lease)
    one.settle()
