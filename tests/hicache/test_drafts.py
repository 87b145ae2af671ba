"""Drafts go with their targets at every level; where one is lost it is zeroed and said so."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hicache.rig import Gate, Rig, branch, chain, geometry
from hicache.test_levels import squeeze

from hicache_storage import BackendUnavailable, ConfigError
from hicache_storage.pairing import PairedStore
from hicache_storage.pools.device import MHADevicePool

MakeRig = Callable[..., Rig]


def stored(rig: MakeRig, hashes: list[str], *lost: int) -> Rig:
    """A store that has all targets, and all drafts but the lost ones."""
    first = rig()
    first.keep(hashes)
    first.backend.forget(*(f"d:{hashes[i]}" for i in lost))
    first.backend.calls.clear()
    return first


def spoil_drafts(one: Rig) -> None:
    """Fills the draft's host pages with NaN, as an earlier use might have left them."""
    assert one.pools.draft_host is not None
    for part in one.pools.draft_host.parts:
        part.fill_(float("nan"))


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param([0, 1, 2, 3], id="all"),
        pytest.param([1, 3], id="some"),
        pytest.param([0], id="first"),
        pytest.param([], id="none"),
    ],
)
@pytest.mark.parametrize("way", ["absent", "refused half way", "backend fails"])
def test_a_lost_draft_is_zeroed_flagged_and_counted(
    rig: MakeRig, lost: list[int], way: str
) -> None:
    hashes = chain(4)
    first = stored(rig, hashes, *(lost if way == "absent" else []))
    one = rig(backend=first.backend, device_pages=8, host_pages=8)
    names = {f"d:{hashes[i]}" for i in lost}
    if way == "refused half way":
        one.backend.lose = names
    elif way == "backend fails" and lost:

        def fail(hook: str, keys: list[str]) -> None:
            if hook == "batch_get" and keys[0].startswith("d:"):
                raise BackendUnavailable("gone", backend="told", operation=hook)

        one.backend.on = fail
        lost = [0, 1, 2, 3]
    spoil_drafts(one)
    lease = one.fetch(hashes)
    assert lease.drafts == [i not in lost for i in range(4)]
    stats = one.cache.stats()
    assert (stats.loaded_pages, stats.loaded_drafts) == (4, 4 - len(lost))
    assert stats.lost_drafts == len(lost)
    one.cache.release(lease)
    squeeze(one, 8)
    again = one.serve(hashes)
    assert (again.from_host, again.drafts) == (4, [i not in lost for i in range(4)])
    one.cache.release(again)
    one.close()


@pytest.mark.parametrize(("lost", "usable"), [(5, 5), (0, 0), (None, 0), (7, 7)])
@pytest.mark.parametrize("pairing", ["best_effort", "required"])
def test_pages_that_vanish_between_lookup_and_read_are_not_published(
    rig: MakeRig, pairing: str, lost: int | None, usable: int
) -> None:
    hashes = chain(8)
    first = stored(rig, hashes)
    one = rig(backend=first.backend, pairing=pairing)
    gone = hashes if lost is None else [hashes[lost]]

    def vanish(hook: str, keys: list[str]) -> None:
        if hook == "batch_get":
            one.backend.forget(*(f"d:{page_hash}" for page_hash in gone))

    one.backend.on = vanish
    lease = one.fetch(hashes)
    expected = usable if pairing == "required" else 8
    stats = one.cache.stats()
    assert len(lease) == lease.from_storage == stats.loaded_pages == expected
    assert stats.found_pages == 8
    assert lease.drafts == [hashes[i] not in gone for i in range(expected)]
    one.cache.release(lease)
    one.settle()


@pytest.mark.parametrize("missing", [0, 3, 7])
@pytest.mark.parametrize("pairing", ["best_effort", "required"])
def test_nothing_behind_a_missing_target_is_used(rig: MakeRig, pairing: str, missing: int) -> None:
    hashes = chain(8)
    first = stored(rig, hashes)
    one = rig(backend=first.backend, pairing=pairing)
    one.backend.lose = {hashes[missing]}
    lease = one.fetch(hashes)
    assert (len(lease), one.cache.stats().loaded_pages) == (missing, missing)
    one.cache.release(lease)
    one.settle()


def test_target_and_draft_pages_are_independent_and_reported_apart(rig: MakeRig) -> None:
    hashes = chain(4)
    first = stored(rig, hashes)
    first.backend.forget(hashes[2], f"d:{hashes[0]}")
    one = rig(backend=first.backend)
    lease = one.fetch(hashes)
    assert lease.drafts == [False, True]
    stats = one.cache.stats()
    assert (stats.loaded_pages, stats.loaded_drafts) == (2, 1)
    one.cache.release(lease)
    one.close()


@pytest.mark.parametrize("moment", ["at once", "after eviction", "after another attach"])
def test_a_zeroed_draft_is_never_written_to_storage(rig: MakeRig, moment: str) -> None:
    hashes = chain(4)
    first = stored(rig, hashes, 1, 2)
    one = rig(backend=first.backend, device_pages=8)
    lease = one.fetch(hashes)
    one.cache.release(lease)
    if moment == "after eviction":
        squeeze(one, 8)
    if moment == "after another attach":
        one.cache.detach_storage()
        one.backend.forget(*hashes)
        one.attach()
    one.backend.calls.clear()
    one.keep(hashes)
    written = set(one.backend.asked("batch_set"))
    assert not written & {f"d:{hashes[1]}", f"d:{hashes[2]}"}
    assert one.backend.stored() == {*hashes, f"d:{hashes[0]}", f"d:{hashes[3]}"}
    one.close()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("start", [0, 1])
def test_a_computed_page_replaces_one_whose_draft_was_lost(
    rig: MakeRig, policy: str, start: int
) -> None:
    hashes = chain(4)
    first = stored(rig, hashes, 1, 2)
    one = rig(backend=first.backend, device_pages=8, write_policy=policy)
    lease = one.fetch(hashes)
    pages = one.cache.allocate(4 - start)
    assert pages is not None
    one.fill(pages.tolist(), hashes[start:])
    one.cache.insert(lease, hashes, torch.cat([lease.device_indices[:start], pages]))
    assert lease.drafts == [True] * 4
    one.check(lease)
    assert one.cache.stats().replaced_drafts == 2
    assert one.pools.device_allocator.available == 4
    one.cache.release(lease)
    one.keep(hashes)
    squeeze(one, 8)
    assert one.backend.stored() == {*hashes, *(f"d:{h}" for h in hashes)}
    again = one.serve(hashes)
    assert (again.from_host, again.drafts) == (4, [True] * 4)
    one.cache.release(again)
    one.close()


def test_a_page_with_a_lost_draft_stays_while_another_request_reads_it(rig: MakeRig) -> None:
    hashes = chain(2)
    first = stored(rig, hashes, 1)
    one = rig(backend=first.backend)
    reader = one.fetch(hashes, "reader")
    writer = one.cache.acquire("writer", hashes)
    pages = one.cache.allocate(2)
    assert pages is not None
    one.fill(pages.tolist(), hashes)
    one.cache.insert(writer, hashes, pages)
    assert writer.device_indices.tolist() == reader.device_indices.tolist()
    one.check(reader)
    one.check(writer)
    one.cache.release(reader)
    one.cache.release(writer)
    one.close()


def test_a_draft_that_storage_brings_later_reaches_the_device(rig: MakeRig) -> None:
    hashes = chain(3)
    first = stored(rig, hashes, 1)
    one = rig(backend=first.backend)
    one.cache.release(one.fetch(hashes))
    one.cache.detach_storage()
    again = rig()
    again.keep(hashes)
    one.pairing = "required"
    one.attach(again.backend)
    assert len(one.cache.acquire("early", hashes)) == 1
    lease = one.fetch(hashes, "late")
    assert (len(lease), lease.drafts) == (3, [True] * 3)
    one.cache.release(lease)


def test_a_host_page_that_a_load_may_read_is_not_replaced(rig: MakeRig) -> None:
    hashes = chain(3)
    first = stored(rig, hashes, 1)
    one = rig(backend=first.backend)
    reader = one.fetch(hashes, "reader")
    one.cache.detach_storage()
    again = rig()
    again.keep(hashes)
    one.pairing = "required"
    one.attach(again.backend)
    before = [node.host for node in reader.nodes]
    lease = one.fetch(hashes, "early")
    assert len(lease) == 1, "the reader has the device page without a draft"
    assert [node.host for node in reader.nodes] == before
    one.cache.release(lease)
    one.cache.release(reader)
    lease = one.fetch(hashes, "late")
    assert (len(lease), lease.drafts) == (3, [True] * 3)
    one.cache.release(lease)
    one.close()


def test_no_draft_is_loaded_into_a_page_that_another_request_reads(rig: MakeRig) -> None:
    hashes = chain(3)
    first = stored(rig, hashes, 1)
    one = rig(backend=first.backend)
    reader = one.fetch(hashes, "reader")
    one.cache.insert(reader, hashes, reader.device_indices)
    one.cache.detach_storage()
    again = rig()
    again.keep(hashes)
    one.pairing = "required"
    one.attach(again.backend)
    lease = one.fetch(hashes, "early")
    assert len(lease) == 1
    assert reader.nodes[1].draft_on_host, "storage brought the draft as far as the host"
    assert one.zero_draft(int(reader.device_indices[1]))
    one.check(reader)
    one.cache.release(lease)
    one.cache.release(reader)
    lease = one.cache.acquire("late", hashes)
    assert lease.drafts == [True] * 3
    one.check(lease)
    one.cache.release(lease)
    one.close()


def test_required_pages_without_their_draft_are_neither_used_nor_written(rig: MakeRig) -> None:
    hashes = chain(4)
    first = stored(rig, hashes, 2)
    one = rig(backend=first.backend)
    one.cache.release(one.fetch(hashes))
    one.cache.detach_storage()
    one.pairing = "required"
    other = rig(pairing="required")
    one.attach(other.backend)
    lease = one.cache.acquire("r", hashes)
    assert lease.hashes == hashes[:2]
    one.idle()
    assert other.backend.stored() == {*hashes[:2], *(f"d:{h}" for h in hashes[:2])}
    one.cache.release(lease)
    one.keep(hashes)
    assert other.backend.stored() == {*hashes, *(f"d:{h}" for h in hashes)}
    one.close()


def test_a_host_page_does_not_change_while_it_is_written(rig: MakeRig) -> None:
    hashes = chain(2)
    first = stored(rig, hashes, 1)
    one = rig(backend=first.backend)
    one.cache.release(one.fetch(hashes))
    one.cache.detach_storage()
    other = rig(store=False)
    one.attach(other.backend)
    gate = other.backend.on = Gate("batch_set", hashes[1])
    lease = one.cache.acquire("r", hashes)
    one.until(gate.entered.is_set)
    page = lease.nodes[1].host
    assert page is not None
    assert one.pools.draft_host is not None
    pages = one.cache.allocate(1)
    assert pages is not None
    one.fill(pages.tolist(), hashes[1:])
    one.cache.insert(lease, hashes, torch.cat([lease.device_indices[:1], pages]))
    assert lease.drafts == [True, True]
    assert not any(any(span) for span in one.pools.draft_host.spans(page))
    gate.open()
    one.idle()
    one.cache.release(lease)
    one.keep(hashes)
    assert other.backend.stored() == {*hashes, *(f"d:{h}" for h in hashes)}
    one.close()


def test_pages_from_before_the_draft_was_registered_have_none(rig: MakeRig) -> None:
    one = rig(draft=False, store=False, write_policy="write_back", device_pages=8)
    hashes = chain(3)
    one.keep(hashes)
    pool = MHADevicePool(geometry(1), 8)
    for part in (*pool.k, *pool.v):
        part.fill_(float("nan"))
    assert one.pools.register_draft(pool)
    lease = one.cache.acquire("r", hashes)
    assert lease.drafts == [False] * 3
    one.cache.release(lease)
    squeeze(one, 8)
    lease = one.cache.acquire("r", hashes)
    assert (lease.from_host, lease.drafts) == (3, [False] * 3)
    one.check(lease)
    one.cache.release(lease)
    one.close()


def test_a_page_kept_without_its_draft_is_not_written_where_drafts_are_required(
    rig: MakeRig,
) -> None:
    hashes = chain(3)
    first = stored(rig, hashes, 1)
    one = rig(backend=first.backend)
    reader = one.fetch(hashes, "reader")
    one.cache.detach_storage()
    one.pairing = "required"
    other = rig(store=False)
    one.attach(other.backend)
    writer = one.serve(hashes, "writer")
    assert writer.drafts == [True, False, True], "the reader still has the old page"
    one.idle()
    assert other.backend.stored() & set(hashes) == {hashes[0], hashes[2]}
    one.cache.release(reader)
    one.cache.release(writer)
    one.keep(hashes)
    assert set(hashes) <= other.backend.stored()
    one.close()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_without_a_draft_pool_there_is_no_draft_traffic(rig: MakeRig, policy: str) -> None:
    hashes = chain(4)
    one = rig(draft=False, write_policy=policy, write_threshold=1, device_pages=8)
    for _ in range(2):
        one.keep(hashes)
    squeeze(one, 8)
    two = rig(draft=False, backend=one.backend)
    lease = two.fetch(hashes)
    assert (len(lease), lease.drafts) == (4, None)
    assert two.cache.stats().lost_drafts == 0
    assert one.backend.stored() == set(hashes)
    assert not [key for _, keys in one.backend.calls for key in keys if key.startswith("d:")]
    two.cache.release(lease)
    one.close()
    two.close()


def test_a_storage_for_targets_only_leaves_drafts_lost_and_says_so(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    hashes = chain(3)
    one, two = rig(store=False), rig(store=False)
    for each in (one, two):
        target, _ = each.pools.namespaces(model="m", draft_model="d")
        each.cache.attach_storage(PairedStore(one.pairs().store, target))
    assert "keeps no drafts" in caplog.text
    one.keep(hashes)
    spoil_drafts(two)
    lease = two.fetch(hashes)
    assert lease.drafts == [False] * 3
    two.cache.release(lease)
    one.close()
    two.close()


def test_a_store_with_drafts_needs_a_draft_pool(rig: MakeRig) -> None:
    one, two = rig(store=False), rig(store=False, draft=False)
    with pytest.raises(ConfigError, match="no draft pool is registered"):
        two.cache.attach_storage(one.pairs())


def test_five_hundred_rounds_of_faulty_restores_leave_no_wrong_draft(rig: MakeRig) -> None:
    """Backup, eviction and restore of random prefixes, one draft read in ten failing: whatever
    a request gets is the page of its hash, or flagged and zero."""
    luck = random.Random(6)
    first = rig(device_pages=48, host_pages=48)
    prompts = [branch(chain(3, str(i % 3)), 3, str(i)) for i in range(8)]
    for prompt in prompts:
        first.keep(prompt)
    one = rig(backend=first.backend, device_pages=8, host_pages=10, write_policy="write_back")

    def fault(hook: str, keys: list[str]) -> None:
        one.backend.lose = (
            {key for key in keys if luck.random() < 0.1} if keys[0].startswith("d:") else set()
        )

    one.backend.on = fault
    pages = lost = 0
    for i in range(500):
        prompt = luck.choice(prompts)[: luck.randint(1, 6)]
        lease = one.fetch(prompt, f"r{i}")
        assert lease.drafts is not None
        pages, lost = pages + len(lease), lost + lease.drafts.count(False)
        one.cache.release(lease)
        if luck.random() < 0.3:
            one.cache.clear()
    stats = one.cache.stats()
    assert stats.lost_drafts == lost
    assert stats.device_hits + stats.host_hits + stats.storage_hits == pages
    assert stats.loaded_pages > stats.loaded_drafts > 0.8 * stats.loaded_pages
    assert stats.host_hits > 0
    one.close()
