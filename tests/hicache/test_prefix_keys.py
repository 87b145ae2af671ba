"""Prefix keys: every call tells the backend which pages of the prompt come before its first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hicache.rig import Rig, ToldBackend, branch, chain

from hicache_storage.hicache.storage_threads import BATCH_PAGES

MakeRig = Callable[..., Rig]
COUNT = BATCH_PAGES + 6


def check(backend: ToldBackend, prompt: list[str], *, from_page: int = 0) -> set[str]:
    """That each call's prefix is the prompt's before its first page; the hooks that were called."""
    for (_, keys), prefix in zip(backend.calls, backend.prefixes, strict=True):
        tag = "d:" if keys[0].startswith("d:") else ""
        position = prompt.index(keys[0].removeprefix("d:"))
        assert position >= from_page
        assert prefix == [f"{tag}{page}" for page in prompt[:position]]
    hooks = {hook for hook, _ in backend.calls}
    backend.calls.clear()
    backend.prefixes.clear()
    return hooks


@pytest.mark.parametrize("draft", [False, True])
def test_writes_lookups_and_reads_in_batches(rig: MakeRig, draft: bool) -> None:
    prompt = chain(COUNT)
    pages = {"device_pages": COUNT, "host_pages": 2 * COUNT, "draft": draft}
    first = rig(storage={"backup_limit_pages": COUNT}, **pages)
    first.keep(prompt)
    assert check(first.backend, prompt) == {"batch_set"}

    second = rig(backend=first.backend, **pages)
    assert second.cache.prefetch("r", prompt)
    second.idle()
    lease = second.cache.acquire("r", prompt)
    assert lease.from_storage == COUNT
    second.cache.release(lease)
    assert {"exists", "batch_get"} <= check(first.backend, prompt)


def test_pages_in_memory_come_before_those_that_are_read(rig: MakeRig) -> None:
    prompt = chain(8)
    first = rig()
    first.keep(prompt)
    second = rig(backend=first.backend)
    for length in (4, 8):
        check(first.backend, prompt)
        second.cache.prefetch("r", prompt[:length])
        second.idle()
        second.cache.release(second.cache.acquire("r", prompt[:length]))
    assert {"exists", "batch_get"} <= check(first.backend, prompt, from_page=4)


def test_a_prompt_that_goes_on_from_a_shared_prefix_is_written_behind_it(rig: MakeRig) -> None:
    shared = chain(4)
    one = rig()
    one.keep(shared)
    check(one.backend, shared)
    for name in ("a", "b"):
        prompt = branch(shared, 3, name)
        one.keep(prompt)
        assert "batch_set" in check(one.backend, prompt)
