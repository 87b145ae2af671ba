"""SGLang's unified radix cache and hybrid controller drive every backend through the adapter."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip(
    "sglang.test.kits.unified_radix_cache", reason="needs a real SGLang wheel from 0.5.23 on"
)

import torch
from real_sglang.controllers import hashes_of
from real_sglang.trees import PAGE, Tree, Trees
from sglang.srt.environ import envs

from hicache_storage import Store, open_store
from hicache_storage.adapters import sglang_storage
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.testing.faults import FaultyBackend, NoneResult, Raise, ShortResult

TOKENS = list(range(1, 1 + 5 * PAGE))
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
KINDS = ("mha", "mla")
CALLS = ("flat", "in place")
Make = Callable[..., Tree]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(url, config, kind=..., layout=..., calls=..., draft=...)`: one server's tree."""
    made: list[Trees] = []

    def build(
        url: str,
        config: Any = None,
        *,
        kind: str = "mha",
        layout: str = "page_first",
        calls: str = "in place",
        draft: bool = False,
    ) -> Tree:
        if not made or (made[-1].kind, made[-1].layout) != (kind, layout):
            while made:
                made.pop().doCleanups()
            made.append(Trees(layout, kind))
        tree = made[-1].tree(
            "hicache_storage", {"url": url, "revision": "r1", **(config or {})}, draft=draft
        )
        if calls == "flat":
            tree.controller.page_get_func = tree.controller._generic_page_get
            tree.controller.page_set_func = tree.controller._generic_page_set
        return tree

    yield build
    for trees in reversed(made):
        trees.doCleanups()


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


CASES = [
    case
    for case in itertools.product(KINDS, LAYOUTS, CALLS, ("file", "lmdb", "s3", "redis"))
    if case[3] == "file" or case[1] == "page_first"
]


@pytest.mark.servers
@pytest.mark.parametrize(("kind", "layout", "calls", "backend"), CASES)
def test_target_and_draft_come_back_after_a_restart(
    make: Make, store_url: Any, kind: str, layout: str, calls: str, backend: str
) -> None:
    url = store_url(backend)
    options = {"kind": kind, "layout": layout, "calls": calls, "draft": True}
    before = make(url, **options)
    before.fill(1)
    written = before.write(TOKENS)
    targets, drafts = before.rows(written), before.rows(written, before.draft)
    before.stop()
    after = make(url, **options)
    after.fill(2)
    read = after.read(TOKENS)
    assert len(read) == len(TOKENS)
    assert equal(after.rows(read), targets)
    assert equal(after.rows(read, after.draft), drafts)
    assert after.threads_alive()


@pytest.mark.parametrize("calls", CALLS)
def test_more_pages_than_a_batch_come_back(make: Make, store_url: Any, calls: str) -> None:
    tokens = list(range(1, 1 + 60 * PAGE))
    url = store_url("file")
    before = make(url, calls=calls, draft=True)
    before.fill(1)
    written = before.write(tokens)
    targets = before.rows(written)
    after = make(url, calls=calls, draft=True)
    read = after.read(tokens)
    assert len(read) == len(tokens)
    assert equal(after.rows(read), targets)


@pytest.mark.parametrize(("pairing", "pages"), [("auto", 2), ("required", 2), ("best_effort", 5)])
@pytest.mark.parametrize("calls", CALLS)
def test_a_lost_draft_costs_what_pairing_says_and_its_slot_is_zeros(
    make: Make, store_url: Any, pairing: str, pages: int, calls: str
) -> None:
    url = store_url("file")
    before = make(url, calls=calls, draft=True)
    before.fill(1)
    written = before.write(TOKENS)
    targets, drafts = before.rows(written), before.rows(written, before.draft)
    namespace = before.storage.server.get("draft").namespace
    with open_store(url) as store:
        assert store.delete(namespace, ["d:" + hashes_of(TOKENS)[2]]) == [True]
    after = make(url, {"pairing": pairing}, calls=calls, draft=True)
    after.fill(2)
    read = after.read(TOKENS)
    count = pages * PAGE
    assert len(read) == count
    assert equal(after.rows(read), [rows[:count] for rows in targets])
    for rows in drafts:
        rows[2 * PAGE : 3 * PAGE] = 0
    assert equal(after.rows(read, after.draft), [rows[:count] for rows in drafts])


def test_a_lost_draft_is_healed_when_its_pages_are_computed_again(
    make: Make, store_url: Any
) -> None:
    url = store_url("file")
    before = make(url, draft=True)
    before.fill(1)
    before.write(TOKENS)
    namespace = before.storage.server.get("draft").namespace
    with open_store(url) as store:
        assert store.delete(namespace, ["d:" + hashes_of(TOKENS)[2]]) == [True]
    second = make(url, draft=True)
    assert len(second.read(TOKENS)) == 2 * PAGE
    second.fill(3)
    second.write(TOKENS)
    third = make(url, draft=True)
    assert len(third.read(TOKENS)) == len(TOKENS)


def test_a_draft_that_is_never_written_leaves_the_target_to_best_effort(
    make: Make, store_url: Any
) -> None:
    url = store_url("file")
    make(url).write(TOKENS)
    assert len(make(url, draft=True).read(TOKENS)) == 0
    assert len(make(url, {"pairing": "best_effort"}, draft=True).read(TOKENS)) == len(TOKENS)


def test_sglang_shows_the_backends_own_name(make: Make, store_url: Any) -> None:
    tree = make(store_url("lmdb"))
    assert type(tree.controller.storage_backend).__name__ == "HiCacheLmdb"
    assert tree.controller.page_get_func.__name__ == "_page_get_zero_copy"


def test_storage_is_attached_detached_and_cleared_as_over_http(make: Make, store_url: Any) -> None:
    url = store_url("file")
    tree = make(url)
    tree.fill(1)
    tree.write(TOKENS)
    store: Store = tree.storage.server.store
    done, message = tree.cache.detach_storage_backend()
    assert done, message
    assert "closed" in repr(store)
    config = json.dumps({"url": url, "pairng": "x"})
    done, message = tree.cache.attach_storage_backend("hicache_storage", config, "served")
    assert not done
    assert "did you mean 'pairing'" in message
    config = json.dumps({"url": url, "revision": "r1", "prefetch_threshold": 1})
    done, message = tree.cache.attach_storage_backend("hicache_storage", config, "served")
    assert done, message
    assert tree.storage.batch_exists(hashes_of(TOKENS), None) == 5
    assert tree.cache.clear_storage_backend()
    assert tree.storage.batch_exists(hashes_of(TOKENS), None) == 0


@pytest.mark.parametrize("hook", ["batch_set", "batch_get", "exists"])
@pytest.mark.parametrize(
    "fault", [Raise(OSError(5, "I/O error")), NoneResult(), ShortResult()], ids=str
)
@pytest.mark.parametrize("calls", CALLS)
def test_whatever_storage_does_the_tree_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, hook: str, fault: Any, calls: str
) -> None:
    if hook == "exists" and isinstance(fault, ShortResult):
        pytest.skip("a count can't be short")
    backend = FaultyBackend(MemoryBackend(MemoryConfig()))
    monkeypatch.setattr(sglang_storage, "open_store", lambda *_, **__: Store(backend, name="bad"))
    tree = make("memory://", calls=calls, draft=True)
    tree.fill(1)
    backend.inject(hook, fault)
    tree.write(TOKENS)
    other = make("memory://", calls=calls, draft=True)
    assert len(other.read(TOKENS)) == 0
    assert other.threads_alive()
    assert tree.threads_alive()
    backend.heal()
    later = [token + 1000 for token in TOKENS]
    written = tree.write(later)
    read = other.read(later, "r2")
    assert len(read) == len(later)
    assert equal(other.rows(read), tree.rows(written))


@pytest.mark.slow
def test_random_failures_never_give_wrong_rows(make: Make, store_url: Any) -> None:
    url = store_url("file")
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.2):
        came = 0
        for round_number in range(12):
            tokens = [token + 100 * round_number for token in TOKENS]
            writer = make(url, draft=True)
            writer.fill(round_number)
            written = writer.write(tokens)
            reader = make(url, draft=True)
            assert (
                type(reader.controller.storage_backend).__name__ == "HiCacheStorageFailureInjector"
            )
            reader.fill(1000 + round_number)
            read = reader.read(tokens)
            part = written[: len(read)]
            assert equal(reader.rows(read), writer.rows(part))
            assert equal(reader.rows(read, reader.draft), writer.rows(part, writer.draft))
            assert reader.threads_alive()
            assert writer.threads_alive()
            came += len(read)
            writer.stop()
            reader.stop()
    assert 0 < came < 12 * len(TOKENS)
