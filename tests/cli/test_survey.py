"""stat, verify and clean: they count and take exactly what they say, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.prefix import DRAFT, HASHES, TARGET, Ran, damage, pairs, put, space

from hicache_storage import Namespace, Store
from hicache_storage.keys import draft_key

Run = Callable[..., Ran]


def stored(store: Store, namespace: Namespace, tag: str = "") -> list[int]:
    """Which pages of the prefix are there."""
    return [i for i, one in enumerate(HASHES) if store.exists(namespace, [tag + one])]


def by_digest(document: Any) -> dict[str, Any]:
    return {one["digest"]: one for one in document["namespaces"]}


# -- stat --------------------------------------------------------------------------------------


def test_stat_tells_target_and_draft_pairs_orphans_and_losses_apart(
    store: Store, run: Run, url: str
) -> None:
    put(store, targets=[0, 1, 2, 3, 4, 5], drafts=[0, 1, 2, 8, 9])
    document = run("stat", url, "--json").document
    found = by_digest(document)
    assert found.keys() == {TARGET.digest, DRAFT.digest}
    target, draft = found[TARGET.digest], found[DRAFT.digest]
    assert target["namespace"]["model"] == "org/target"
    assert target["pools"]["target"]["pages"] == 6
    assert target["pools"]["target"]["stored_bytes"] == 6 * (512 + 64)
    assert (target["pairs"], target["lost_drafts"], target["orphan_drafts"]) == (3, 3, None)
    assert draft["pools"]["draft"]["pages"] == 5
    assert (draft["pairs"], draft["lost_drafts"], draft["orphan_drafts"]) == (None, None, 2)
    text = run("stat", url).out
    assert "3 pairs, 3 drafts lost" in text
    assert "2 orphans" in text
    assert "org/target" in text


def test_a_server_without_drafts_loses_none(store: Store, run: Run, url: str) -> None:
    put(store, drafts=[])
    found = by_digest(run("stat", url, "--json").document)[TARGET.digest]
    assert (found["pairs"], found["lost_drafts"]) == (0, 0)


def test_pairs_are_counted_within_a_rank_and_a_tenant(store: Store, run: Run, url: str) -> None:
    ranks = [space(tp_size=2, tp_rank=rank) for rank in range(2)]
    drafts = [
        space(model="org/draft", layers=1, page_bytes=256, tp_size=2, tp_rank=rank)
        for rank in range(2)
    ]
    put(store, target=ranks[0], draft=drafts[0])
    put(store, target=ranks[1], draft=drafts[1], drafts=[0, 1])
    put(store, target=space(tenant="b"), draft=space(model="d", tenant="c"), drafts=[0])
    found = by_digest(run("stat", url, "--json").document)
    assert found[ranks[0].digest]["pairs"] == 10
    assert found[ranks[1].digest]["pairs"] == 2
    assert found[ranks[1].digest]["lost_drafts"] == 8
    assert found[space(tenant="b").digest]["pairs"] == 0
    assert found[space(model="d", tenant="c").digest]["orphan_drafts"] == 1


def test_a_replicated_target_pairs_with_the_draft_of_every_rank(
    store: Store, run: Run, url: str
) -> None:
    target = space(pool="mla", heads=1, v_head_dim=0)
    drafts = [space(model="org/draft", tp_size=2, tp_rank=rank) for rank in range(2)]
    put(store, target=target, draft=drafts[0], drafts=[0, 1, 2, 3, 4])
    put(store, target=target, draft=drafts[1], drafts=[5, 6])
    found = by_digest(run("stat", url, "--json").document)
    assert found[target.digest]["pairs"] == 7
    assert [found[one.digest]["orphan_drafts"] for one in drafts] == [0, 0]


def test_a_namespace_without_its_record_is_shown_as_unknown(
    store: Store, run: Run, url: str
) -> None:
    put(store)
    store._caller.delete([f"{TARGET.digest}/n:{TARGET.digest}"])
    found = by_digest(run("stat", url, "--json").document)
    assert found[TARGET.digest]["namespace"] is None
    assert found[TARGET.digest]["pools"]["target"]["pages"] == 10
    assert "its record is lost" in run("stat", url).out


def test_stat_of_an_empty_store_says_so(store: Store, run: Run, url: str) -> None:
    assert "nothing is stored" in run("stat", url).out


def test_stat_of_a_backend_that_cannot_scan_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_storage.backends.memory.MemoryBackend.scan", None)
    ran = run("stat", "memory://")
    assert ran.status == 0
    assert "not known: this backend has no scan" in ran.out
    ran = run("verify", "memory://")
    assert ran.status == 2
    assert "verify needs a backend with scan" in ran.err


# -- verify ------------------------------------------------------------------------------------


def test_verify_reads_every_page_and_names_the_bad_ones(store: Store, run: Run, url: str) -> None:
    put(store)
    assert run("verify", url).out == "22 pages read: 22 good, 0 bad, 0 unreadable\n"
    damage(store, HASHES[3])
    damage(store, draft_key(HASHES[5]), DRAFT)
    ran = run("verify", url, "--json")
    assert ran.status == 1
    document = ran.document
    assert (document["pages"], document["good"], document["bad"]) == (22, 20, 2)
    assert {one["key"] for one in document["wrong"]} == {
        f"{TARGET.digest}/{HASHES[3]}",
        f"{DRAFT.digest}/d:{HASHES[5]}",
    }
    assert stored(store, TARGET) == list(range(10))
    assert "--delete-bad would delete the bad ones" in run("verify", url).out


def test_verify_deletes_only_bad_pages_and_only_when_told(store: Store, run: Run, url: str) -> None:
    put(store)
    damage(store, HASHES[3])
    ran = run("verify", url, "--delete-bad", "--json")
    assert ran.status == 1
    assert ran.document["deleted"] == 1
    assert stored(store, TARGET) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert run("verify", url).status == 0


def test_verify_can_be_limited_to_a_model(store: Store, run: Run, url: str) -> None:
    put(store)
    damage(store, draft_key(HASHES[5]), DRAFT)
    assert run("verify", url, "--model", "org/target", "--json").document["pages"] == 11
    assert run("verify", url, "--model", "org/target").status == 0
    assert run("verify", url, "--namespace", DRAFT.digest[:10]).status == 1


def test_verify_does_not_need_the_namespace_record(store: Store, run: Run, url: str) -> None:
    put(store)
    store._caller.delete([f"{TARGET.digest}/n:{TARGET.digest}"])
    damage(store, HASHES[0])
    document = run("verify", url, "--json").document
    assert (document["good"], document["bad"]) == (20, 1)


def test_a_page_that_cannot_be_read_is_never_deleted(
    store: Store, run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unreadable is not bad: the store may be back tomorrow."""
    from hicache_storage import BackendUnavailable
    from hicache_storage.calling import Caller

    put(store)
    reading = Caller.batch_get
    bad = f"{TARGET.digest}/{HASHES[2]}"

    def fails(self: Caller, keys: list[str], *rest: Any) -> list[bool]:
        if bad in keys:
            raise BackendUnavailable("I/O error", backend="file", operation="batch_get")
        return reading(self, keys, *rest)

    monkeypatch.setattr(Caller, "batch_get", fails)
    ran = run("verify", url, "--delete-bad", "--json")
    assert ran.status == 1
    document = ran.document
    assert (document["good"], document["unreadable"], document["deleted"]) == (21, 1, 0)
    assert document["wrong"][0]["key"] == bad
    assert "I/O error" in document["wrong"][0]["reason"]
    monkeypatch.undo()
    assert stored(store, TARGET) == list(range(10))


# -- clean -------------------------------------------------------------------------------------


def age(url: str, store: Store, names: list[str], seconds: float) -> None:
    """Makes files look unused for this long."""
    from hicache_storage.backends.file.names import page_place

    for name in names:
        place, file_name = page_place(name)
        path = Path(url.removeprefix("file://")) / place / file_name
        moment = time.time() - seconds
        os.utime(path, (moment, moment))


def test_clean_needs_to_be_told_what(store: Store, run: Run, url: str) -> None:
    put(store)
    ran = run("clean", url, "--yes")
    assert ran.status == 2
    assert "say what to clean" in ran.err
    ran = run("clean", url, "--all", "--model", "org/target", "--yes")
    assert ran.status == 2
    assert "can't be combined" in ran.err
    assert stored(store, TARGET) == list(range(10))


@pytest.mark.parametrize(
    "selection",
    [
        ["--all"],
        ["--model", "org/target"],
        ["--namespace", TARGET.digest],
        ["--older-than", "0s"],
        ["--orphan-drafts", "--older-than", "0s"],
    ],
)
def test_clean_deletes_nothing_without_yes(
    store: Store, run: Run, url: str, selection: list[str]
) -> None:
    put(store, targets=[0, 1])
    ran = run("clean", url, *selection)
    assert ran.status == 0
    assert "nothing was deleted (--yes deletes)" in ran.out
    assert "would delete 0 pages" not in ran.out
    assert stored(store, TARGET) == [0, 1]
    assert stored(store, DRAFT, "d:") == list(range(10))


def test_clean_takes_a_namespace_and_no_other(store: Store, run: Run, url: str) -> None:
    other = space(tenant="b")
    put(store)
    put(store, target=other, drafts=[])
    ran = run("clean", url, "--namespace", TARGET.digest[:12], "--yes", "--json")
    assert ran.status == 0
    assert ran.document["deleted_pages"] == 10
    assert stored(store, TARGET) == []
    assert stored(store, other) == list(range(10))
    assert stored(store, DRAFT, "d:") == list(range(10))
    assert TARGET.digest not in by_digest(run("stat", url, "--json").document)


def test_clean_by_model_takes_all_its_namespaces(store: Store, run: Run, url: str) -> None:
    other = space(tenant="b")
    put(store)
    put(store, target=other, drafts=[])
    assert run("clean", url, "--model", "org/target", "--yes").status == 0
    assert stored(store, TARGET) == stored(store, other) == []
    assert stored(store, DRAFT, "d:") == list(range(10))


def test_clean_by_age_takes_old_pages_only(store: Store, run: Run, url: str) -> None:
    put(store)
    old = [f"{TARGET.digest}/{HASHES[i]}" for i in (2, 3)]
    old += [f"{DRAFT.digest}/d:{HASHES[4]}"]
    age(url, store, old, 10 * 86400)
    ran = run("clean", url, "--older-than", "7d", "--yes", "--json")
    assert ran.document["deleted_pages"] == 3
    assert stored(store, TARGET) == [0, 1, 4, 5, 6, 7, 8, 9]
    assert stored(store, DRAFT, "d:") == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    ran = run("clean", url, "--older-than", "7d", "--model", "org/draft", "--yes", "--json")
    assert ran.document["deleted_pages"] == 0


def test_clean_by_age_keeps_the_record_of_a_namespace_that_may_be_in_use(
    store: Store, run: Run, url: str
) -> None:
    put(store)
    names = [f"{TARGET.digest}/{one}" for one in HASHES]
    age(url, store, names, 10 * 86400)
    run("clean", url, "--older-than", "7d", "--yes")
    assert stored(store, TARGET) == []
    assert store.namespaces()[TARGET.digest] == TARGET


def test_clean_of_orphan_drafts_keeps_pairs_and_young_drafts(
    store: Store, run: Run, url: str
) -> None:
    """A young draft's target may just be on its way."""
    put(store, targets=[0, 1, 2])
    age(url, store, [f"{DRAFT.digest}/d:{HASHES[i]}" for i in (1, 5, 6)], 3600)
    ran = run("clean", url, "--orphan-drafts", "--yes", "--json")
    assert ran.document["deleted_pages"] == 2
    assert stored(store, DRAFT, "d:") == [0, 1, 2, 3, 4, 7, 8, 9]
    ran = run("clean", url, "--orphan-drafts", "--older-than", "0s", "--yes", "--json")
    assert ran.document["deleted_pages"] == 5
    assert stored(store, DRAFT, "d:") == [0, 1, 2]
    assert stored(store, TARGET) == [0, 1, 2]


def test_an_orphan_whose_target_has_come_meanwhile_stays(
    store: Store, run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicache_storage.cli import cleaning

    put(store, targets=[0])
    surveying = cleaning.survey

    def survey_and_write(looked_at: Store) -> Any:
        found = surveying(looked_at)
        put(store, targets=[0, 1, 2, 3, 4], drafts=[])
        return found

    monkeypatch.setattr(cleaning, "survey", survey_and_write)
    ran = run("clean", url, "--orphan-drafts", "--older-than", "0s", "--yes", "--json")
    assert ran.status == 0
    assert ran.document["deleted_pages"] == 5
    assert stored(store, DRAFT, "d:") == [0, 1, 2, 3, 4]


def test_clean_all_empties_the_store_of_pages_and_leaves_other_files(
    store: Store, run: Run, url: str
) -> None:
    put(store)
    foreign = Path(url.removeprefix("file://")) / "notes.txt"
    foreign.write_text("mine")
    assert run("clean", url, "--all", "--yes").status == 0
    assert run("stat", url, "--json").document["namespaces"] == []
    assert foreign.read_text() == "mine"


def test_clean_deletes_targets_before_their_drafts(
    store: Store, run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no visible target ever lacks a draft that was there."""
    from hicache_storage.calling import Caller

    put(store)
    order: list[str] = []
    deleting = Caller.delete

    def noted(self: Caller, keys: list[str]) -> list[bool]:
        order.extend("draft" if "/d:" in key else "target" for key in keys if "/n:" not in key)
        return deleting(self, keys)

    monkeypatch.setattr(Caller, "delete", noted)
    run("clean", url, "--all", "--yes")
    assert order == ["target"] * 10 + ["draft"] * 10


def test_pages_of_unknown_age_are_left_and_counted(
    run: Run, monkeypatch: pytest.MonkeyPatch, store: Store, url: str
) -> None:
    from hicache_storage.calling import Caller

    put(store)
    scanning = Caller.scan

    def without_times(self: Caller, prefix: str) -> Any:
        return (page._replace(used_s=None) for page in scanning(self, prefix))

    monkeypatch.setattr(Caller, "scan", without_times)
    ran = run("clean", url, "--older-than", "1h", "--yes", "--json")
    assert (ran.document["deleted_pages"], ran.document["unknown_age_pages"]) == (0, 20)


@pytest.mark.parametrize("text", ["7", "d", "7 days", "-1d", "1y", ""])
def test_an_age_has_a_number_and_a_unit(store: Store, run: Run, url: str, text: str) -> None:
    put(store)
    ran = run("clean", url, f"--older-than={text}")
    assert ran.status == 2
    assert "write 90s, 15m, 36h, 7d or 2w" in ran.err or "say what to clean" in ran.err


def test_the_pairs_written_here_are_pairs_of_the_library(store: Store) -> None:
    put(store)
    assert pairs(store).exists(HASHES).usable == 10
