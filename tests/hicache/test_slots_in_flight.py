"""Host pages that an I/O thread has stay its own until its call has returned, whatever happens
to the operation; afterwards each goes back exactly once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hicache.rig import Gate, Rig, chain

MakeRig = Callable[..., Rig]
HASHES = chain(4)


def reader(rig: MakeRig, **options: Any) -> Rig:
    first = rig(store=True)
    first.keep(HASHES)
    return rig(backend=first.backend, host_pages=16, prefetch_policy="best_effort", **options)


def take_all_host_pages(one: Rig) -> Any:
    """All free host pages, filled with a pattern that late bytes would spoil."""
    taken = one.pools.host_allocator.alloc(one.pools.host_allocator.available)
    for pool in (one.pools.host, one.pools.draft_host):
        assert pool is not None
        for page in taken.tolist():
            for span in pool.spans(page):
                span[:] = b"\xee" * len(span)
    return taken


def untouched(one: Rig, taken: Any) -> bool:
    return all(
        bytes(span) == b"\xee" * len(span)
        for pool in (one.pools.host, one.pools.draft_host)
        if pool is not None
        for page in taken.tolist()
        for span in pool.spans(page)
    )


@pytest.mark.parametrize("half", ["target", "draft"])
@pytest.mark.parametrize("way", ["acquire", "cancel", "detach", "close"])
def test_late_bytes_never_land_in_a_page_that_was_handed_on(
    rig: MakeRig, half: str, way: str
) -> None:
    one = reader(rig)
    gate = one.backend.on = Gate("batch_get", HASHES[0] if half == "target" else f"d:{HASHES[0]}")
    one.cache.prefetch("r", HASHES)
    one.until(gate.entered.is_set)
    if way == "acquire":
        lease = one.cache.acquire("r", HASHES)
        assert len(lease) == 0
        one.cache.release(lease)
    elif way == "cancel":
        one.cache.cancel_prefetch("r")
    elif way == "detach":
        one.cache.detach_storage(0)
        one.cache.cancel_prefetch("r")
    else:
        one.cache.close(0)
        one.cache.cancel_prefetch("r")
    assert one.cache.stats().prefetch_held_pages == 4
    taken = take_all_host_pages(one)
    assert len(taken) == 12
    gate.open()
    one.idle()
    assert untouched(one, taken)
    assert one.cache.stats().prefetch_held_pages == 0
    one.pools.host_allocator.free(taken)
    one.settle()


def test_a_page_being_written_is_not_handed_on(rig: MakeRig) -> None:
    one = rig(device_pages=8, host_pages=4)
    gate = one.backend.on = Gate("batch_set", HASHES[0])
    one.cache.release(one.serve(HASHES[:2]))
    one.until(gate.entered.is_set)
    one.cache.release(one.serve(chain(4, "other")))
    assert one.pools.host_allocator.available == 0
    one.cache.clear()
    assert one.pools.host_allocator.available == 2
    gate.open()
    one.idle()
    two = rig(backend=one.backend)
    lease = two.fetch(HASHES[:2])
    assert len(lease) == 2
    two.cache.release(lease)
    one.settle()


@pytest.mark.parametrize("moment", ["queued", "lookup", "between", "target", "draft", "after"])
def test_a_cancelled_prefetch_gives_all_its_pages_back(rig: MakeRig, moment: str) -> None:
    one = reader(rig, storage={"prefetch_threads": 1})
    hold = Gate("exists", chain(1, "first")[0])
    gate = {
        "queued": hold,
        "lookup": Gate("exists", HASHES[0]),
        "between": Gate("none"),
        "target": Gate("batch_get", HASHES[0]),
        "draft": Gate("batch_get", f"d:{HASHES[0]}"),
        "after": Gate("none"),
    }[moment]
    one.backend.on = gate
    if moment == "queued":
        one.cache.prefetch("first", chain(1, "first"))
        one.until(gate.entered.is_set)
    for i in range(10):
        name = f"r{i}"
        one.cache.prefetch(name, HASHES)
        if moment in ("lookup", "target", "draft"):
            one.until(gate.entered.is_set)
        if moment == "after":
            one.idle()
        one.cache.cancel_prefetch(name)
        one.cache.cancel_prefetch(name)
        assert one.cache.prefetch_ready(name)
        if moment != "queued":
            gate.open()
            one.idle()
            assert one.pools.host_allocator.available == 16
    gate.open()
    one.idle()
    assert one.pools.host_allocator.available == 16
    one.cache.cancel_prefetch("first")
    one.settle()


def test_a_thousand_prefetches_cancelled_anywhere_leave_every_page_free(rig: MakeRig) -> None:
    one = reader(rig)
    luck = random.Random(13)
    for i in range(1000):
        name = f"r{i}"
        one.cache.prefetch(name, HASHES[: luck.randint(1, 4)])
        for _ in range(luck.randint(0, 3)):
            one.cache.prefetch_ready(name)
        if luck.random() < 0.2:
            one.idle()
        one.cache.cancel_prefetch(name)
        one.idle()
        assert one.pools.host_allocator.available == 16
    one.settle()


@pytest.mark.parametrize("answer", [[], [True], "yes", [1, 1, 1, 1], [None] * 4, -1, 9, True])
@pytest.mark.parametrize("hook", ["exists", "batch_get", "batch_set"])
def test_an_answer_outside_of_the_contract_is_a_miss_and_harms_nothing(
    rig: MakeRig, hook: str, answer: Any
) -> None:
    one = reader(rig)
    good = one.backend.on

    def wrong(name: str, keys: list[str]) -> Any:
        return answer if name == hook else None

    one.backend.on = wrong
    lease = one.fetch(HASHES)
    assert len(lease) == (4 if hook == "batch_set" else 0)
    one.cache.release(lease)
    one.keep(chain(4, "new"))
    assert one.cache.stats().storage_errors > 0
    one.backend.on = good
    again = one.fetch(HASHES, "again")
    assert len(again) == 4
    one.cache.release(again)
    one.keep(chain(4, "new"))
    assert set(chain(4, "new")) <= one.backend.stored()
    one.settle()
