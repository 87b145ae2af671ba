"""Backups: each page's own result, tried again until storage has it; every one is answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hicache.rig import Gate, Rig, branch, chain

from hicache_storage import BackendUnavailable, CapacityExceeded
from hicache_storage.hicache.storage_threads import BATCH_PAGES

MakeRig = Callable[..., Rig]
ERRORS = [
    OSError(5, "told to"),
    BackendUnavailable("told to", backend="told", operation="batch_set"),
    CapacityExceeded("told to", backend="told", operation="batch_set"),
    MemoryError(),
    AssertionError(),
    SystemExit(1),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("hook", ["batch_set", "batch_get", "exists"])
def test_no_error_of_a_backend_ends_a_thread_or_leaves_a_page_behind(
    rig: MakeRig, hook: str, error: BaseException
) -> None:
    one = rig(storage={"prefetch_threads": 1, "backup_threads": 1})
    prompts = [chain(1, str(i)) for i in range(10)]
    failing = prompts[1][0]

    def fail(name: str, keys: list[str]) -> None:
        if name == hook and failing in keys:
            raise error

    one.backend.on = fail
    for prompt in prompts:
        one.keep(prompt)
    lost = hook == "batch_set"
    assert one.cache.stats().written_pages == (9 if lost else 10)
    assert ({failing} <= one.backend.stored()) is not lost
    for i, prompt in enumerate(prompts):
        one.cache.clear()
        lease = one.fetch(prompt, str(i))
        assert len(lease) == (0 if prompt[0] == failing else 1)
        one.cache.release(lease)
    one.backend.on = lambda name, keys: None
    one.keep(prompts[1])
    assert failing in one.backend.stored()
    assert one.cache._storages.current is not None
    assert one.cache._storages.threads == 2
    one.close()


def test_a_page_that_was_refused_is_offered_again(rig: MakeRig) -> None:
    one, hashes = rig(), chain(16)
    one.backend.refuse = {hashes[3]}
    one.keep(hashes[:8])
    assert one.backend.stored() & set(hashes) == {*hashes[:8]} - {hashes[3]}
    assert one.cache.stats().refused_pages == 1
    one.backend.refuse = set()
    one.backend.calls.clear()
    one.keep(hashes)
    assert set(hashes) <= one.backend.stored()
    written = [key for key in one.backend.asked("batch_set") if not key.startswith("d:")]
    assert sorted(written) == sorted([hashes[3], *hashes[8:]])
    one.close()


@pytest.mark.parametrize("half", ["target", "draft"])
def test_a_hit_is_enough_for_another_try(rig: MakeRig, half: str) -> None:
    one, hashes = rig(), chain(4)
    name = hashes[2] if half == "target" else f"d:{hashes[2]}"
    one.backend.refuse = {name}
    one.keep(hashes)
    assert name not in one.backend.stored()
    one.cache.release(one.cache.acquire("still", hashes))
    one.idle()
    assert name not in one.backend.stored()
    one.backend.refuse = set()
    one.cache.release(one.cache.acquire("again", hashes))
    one.idle()
    assert name in one.backend.stored()
    one.backend.calls.clear()
    one.cache.release(one.cache.acquire("once more", hashes))
    one.idle()
    assert one.backend.calls == []
    one.close()


def test_a_page_that_fails_does_not_stop_the_batches_behind_it(rig: MakeRig) -> None:
    hashes = chain(2 * BATCH_PAGES + 5)
    one = rig(device_pages=300, host_pages=300, storage={"backup_limit_pages": 300})

    def fail(hook: str, keys: list[str]) -> None:
        if hook == "batch_set" and hashes[0] in keys:
            raise OSError(28, "told to")

    one.backend.on = fail
    one.keep(hashes)
    assert one.backend.stored() & set(hashes) == set(hashes[BATCH_PAGES:])
    assert max(len(keys) for _, keys in one.backend.calls) == BATCH_PAGES
    one.close()


def test_a_slow_storage_holds_a_bounded_part_of_the_host(rig: MakeRig) -> None:
    one = rig(device_pages=16, host_pages=16, storage={"backup_limit_pages": 4})
    gate = one.backend.on = Gate("batch_set")
    hashes = chain(8)
    one.cache.release(one.serve(hashes))
    one.until(gate.entered.is_set)
    stats = one.cache.stats()
    assert (stats.backup_held_pages, stats.deferred_pages) == (4, 4)
    gate.open()
    one.idle()
    one.keep(hashes)
    assert set(hashes) <= one.backend.stored()
    one.close()


def test_a_page_is_written_by_one_operation_at_a_time(rig: MakeRig) -> None:
    one, trunk = rig(), chain(3)
    gate = one.backend.on = Gate("batch_set")
    for name in "abc":
        one.cache.release(one.serve(branch(trunk, 1, name)))
    gate.open()
    one.idle()
    written = one.backend.asked("batch_set")
    assert len(written) == len(set(written)) == 2 * 6
    one.close()


def test_results_of_a_storage_that_is_gone_say_nothing_about_the_next(rig: MakeRig) -> None:
    one, hashes = rig(), chain(3)
    gate = one.backend.on = Gate("batch_set")
    one.cache.release(one.serve(hashes))
    one.until(gate.entered.is_set)
    assert one.cache.detach_storage(0) == 3
    other = rig(store=False)
    one.attach(other.backend)
    gate.open()
    one.idle()
    assert set(hashes) <= one.backend.stored()
    one.keep(hashes)
    assert set(hashes) <= other.backend.stored()
    one.close()


def test_counts_add_up(rig: MakeRig) -> None:
    one, hashes = rig(), chain(6)
    one.backend.refuse = {hashes[1], f"d:{hashes[2]}"}
    one.keep(hashes)
    stats = one.cache.stats()
    assert (stats.backed_up_pages, stats.written_pages, stats.refused_pages) == (6, 5, 1)
    assert stats.written_drafts == 5
    one.close()
