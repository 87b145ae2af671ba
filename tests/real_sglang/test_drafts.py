"""Draft pages in the releases whose controller sends them itself (0.5.11 to 0.5.18)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs a real SGLang wheel: make sglang")

from real_sglang.controllers import HAS_DRAFT_CALLS, PAGE, Server, hashes_of

from hicache_storage import open_store
from hicache_storage.adapters import sglang_plugin, sglang_storage

pytestmark = pytest.mark.skipif(
    not HAS_DRAFT_CALLS, reason="this release registers draft pools: see test_unified"
)
TOKENS = list(range(100, 100 + 5 * PAGE))
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def restart(
    serve: Any, url: str, pairing: str = "auto", **options: Any
) -> tuple[Server, list[bytes], list[bytes]]:
    """A new server after one that has written TOKENS, and the pages that were written."""
    before = serve(url, {"pairing": pairing}, draft=True, **options)
    before.fill(1)
    indices, stored = before.write(TOKENS)
    assert stored == len(TOKENS)
    wanted = before.pages(indices), before.pages(indices, before.draft)
    before.stop()
    after = serve(url, {"pairing": pairing}, draft=True, **options)
    after.fill(2)
    return after, *wanted


def lose_draft(url: str, server: Server, page: int) -> None:
    draft = server.storage.server.get("draft")
    with open_store(url) as store:
        key = f"d:{hashes_of(TOKENS)[page]}"
        assert store.exists(draft.namespace, [key]) == 1
        assert store.delete(draft.namespace, [key]) == [True]


@pytest.mark.servers
@pytest.mark.parametrize("backend", ["file", "lmdb", "s3", "redis"])
@pytest.mark.parametrize("calls", ["flat", "in place"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_drafts_come_back_with_their_targets(
    serve: Any, store_url: Any, backend: str, calls: str, kind: str
) -> None:
    url = store_url(backend)
    after, targets, drafts = restart(serve, url, calls=calls, kind=kind)
    indices, came = after.prefetch(TOKENS)
    assert came == len(TOKENS)
    assert after.pages(indices) == targets
    assert after.pages(indices, after.draft) == drafts


@pytest.mark.parametrize("calls", ["flat", "in place"])
def test_drafts_are_sent_in_place_unless_the_release_itself_sends_them(
    serve: Any, store_url: Any, calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(store_url("file"), draft=True, calls=calls)
    seen: list[str] = []
    for name in ("batch_set", "batch_get"):
        call = getattr(server.storage, name)

        def watched(keys: Any, *rest: Any, call: Any = call, name: str = name) -> Any:
            seen.append(name)
            return call(keys, *rest)

        monkeypatch.setattr(server.storage, name, watched)
    server.fill(1)
    server.write(TOKENS)
    server.prefetch(TOKENS)
    # Targets and drafts, written once and read once each.
    assert len(seen) == (4 if calls == "flat" else 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_of_every_layout_come_back(serve: Any, store_url: Any, layout: str) -> None:
    after, _, drafts = restart(serve, store_url("file"), layout=layout)
    indices, came = after.prefetch(TOKENS)
    assert came == len(TOKENS)
    assert after.pages(indices, after.draft) == drafts


@pytest.mark.parametrize(("pairing", "came"), [("auto", 2), ("required", 2), ("best_effort", 5)])
def test_a_lost_draft_costs_what_pairing_says_and_its_slot_is_zeros(
    serve: Any, store_url: Any, pairing: str, came: int
) -> None:
    url = store_url("file")
    after, targets, drafts = restart(serve, url, pairing=pairing)
    lose_draft(url, after, 2)
    indices, tokens = after.prefetch(TOKENS)
    assert tokens == came * PAGE
    assert after.pages(indices)[:came] == targets[:came]
    found = after.pages(indices, after.draft)[:came]
    wanted = [page if i != 2 else bytes(len(page)) for i, page in enumerate(drafts)]
    assert found == wanted[:came]


def test_a_lost_draft_is_healed_when_its_pages_are_computed_again(
    serve: Any, store_url: Any
) -> None:
    url = store_url("file")
    after, _, _ = restart(serve, url)
    lose_draft(url, after, 2)
    assert after.prefetch(TOKENS)[1] == 2 * PAGE
    after.fill(1)
    indices, _ = after.write(TOKENS)
    wanted = after.pages(indices), after.pages(indices, after.draft)
    again = serve(url, draft=True)
    indices, came = again.prefetch(TOKENS)
    assert came == len(TOKENS)
    assert (again.pages(indices), again.pages(indices, again.draft)) == wanted


def test_a_draft_lost_between_lookup_and_read_costs_its_target_if_it_is_required(
    serve: Any, store_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store_url("file")
    after, targets, _ = restart(serve, url)
    found = after.storage.batch_exists

    def lookup(*args: Any) -> int:
        run: int = found(*args)
        lose_draft(url, after, 3)
        return run

    monkeypatch.setattr(after.storage, "batch_exists", lookup)
    indices, tokens = after.prefetch(TOKENS)
    assert tokens == 3 * PAGE
    assert after.pages(indices)[:3] == targets[:3]
    assert after.threads_alive()


def test_a_draft_pool_that_was_there_before_the_storage_is_known_too(
    serve: Any, store_url: Any
) -> None:
    server = serve(store_url("file"), draft=True, attach=False)
    server.attach()
    assert server.storage.server.get("draft").pages.pool is server.draft


def test_without_the_plugins_hook_drafts_come_back_too(
    serve: Any, store_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_plugin, "_backend_of", lambda controller: None)
    monkeypatch.setattr(sglang_plugin, "_done", set())
    after, targets, drafts = restart(serve, store_url("file"), calls="flat")
    assert after.storage.server.get("draft") is None
    indices, came = after.prefetch(TOKENS)
    assert came == len(TOKENS)
    assert (after.pages(indices), after.pages(indices, after.draft)) == (targets, drafts)
    assert after.storage.server.pairing == "best_effort"


def test_required_drafts_of_unknown_size_make_nothing_usable(
    serve: Any, store_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_plugin, "_backend_of", lambda controller: None)
    monkeypatch.setattr(sglang_plugin, "_done", set())
    arguments = sglang_storage.server_arguments()
    monkeypatch.setattr(arguments, "speculative_algorithm", "EAGLE3", raising=False)
    after, _, _ = restart(serve, store_url("file"), calls="flat", pairing="required")
    assert after.prefetch(TOKENS)[1] == 0
    assert after.threads_alive()
