"""explain says why a prefix is not read: for each reason, the right one, with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.prefix import DRAFT, HASHES, PAGE_SIZE, TARGET, TOKENS, Ran, damage, put, space

from hicache_storage import Store
from hicache_storage.keys import page_hashes

Run = Callable[..., Ran]


@pytest.fixture
def explain(run: Run, url: str) -> Callable[..., Ran]:
    return lambda *arguments: run("explain", url, "--hashes", *HASHES, *arguments)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return path


def verdict(ran: Ran) -> tuple[str, str]:
    assert ran.status in (0, 1), ran.err
    document = ran.document
    return document["verdict"], " ".join(document["explanation"])


def test_a_whole_prefix_is_readable(store: Store, explain: Any) -> None:
    put(store)
    ran = explain()
    assert ran.status == 0
    assert ran.out.startswith("All 10 pages can be read from ")
    assert "(org/target)." in ran.out
    assert "The draft of each of them is stored too." in ran.out
    document = explain("--json").document
    assert (document["verdict"], document["usable_pages"]) == ("readable", 10)


def test_pages_that_can_be_read_are_said_to_be_those_of_one_namespace(
    store: Store, explain: Any
) -> None:
    """Whose that is, only the server knows: of another type or tenant it doesn't read them."""
    put(store, target=space(tenant="t1"), drafts=[])
    code, text = verdict(explain("--json"))
    assert code == "readable"
    assert "That namespace is mha bfloat16, " in text
    assert "tenant t1. A server with another one doesn't read it" in text
    own = explain("--namespace", space(tenant="t1").digest, "--json")
    assert "That namespace" not in verdict(own)[1]


def test_an_empty_store_is_told_from_a_miss(store: Store, explain: Any) -> None:
    code, text = verdict(explain("--json"))
    assert code == "store_empty"
    assert "nothing was written here yet" in text


@pytest.mark.parametrize("kept", [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9], [4, 5]])
def test_without_the_first_page_nothing_is_usable_although_pages_are_stored(
    store: Store, explain: Any, kept: list[int]
) -> None:
    put(store, targets=kept)
    ran = explain("--json")
    code, text = verdict(ran)
    assert ran.status == 1
    assert code == "first_page_missing"
    assert f"although {len(kept)} of 10 pages are stored" in text
    assert ran.document["usable_pages"] == 0
    assert ran.document["namespaces"][0]["missing"] == [i for i in range(10) if i not in kept]


@pytest.mark.parametrize("hole", range(1, 10))
def test_a_hole_is_named_with_its_place_and_what_lies_behind_it(
    store: Store, explain: Any, hole: int
) -> None:
    put(store, targets=[i for i in range(10) if i != hole])
    ran = explain("--json")
    code, text = verdict(ran)
    assert code == "hole"
    assert f"Page {hole} of 10 is missing" in text
    behind = 9 - hole
    assert (f"although {behind} behind it are stored" if behind else "none behind it") in text
    assert ran.document["usable_pages"] == hole


def test_a_prefix_that_nobody_stored_is_said_to_be_nowhere(
    store: Store, run: Run, url: str
) -> None:
    put(store)
    ran = run("explain", url, "--hashes", "0" * 64, "f" * 64, "--json")
    assert verdict(ran)[0] == "not_stored"
    assert ran.document["usable_pages"] == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn' instead of 'bfloat16'"),
        ({"revision": "v2"}, "revision: 'v2' instead of ''"),
        ({"tenant": "t2"}, "tenant: 't2' instead of ''"),
        ({"tp_size": 2, "heads": 1, "page_bytes": 256}, "heads: 1 instead of 2"),
        ({"order": "layer_token"}, "order: 'layer_token' instead of 'token_layer'"),
    ],
)
def test_pages_in_another_namespace_are_found_with_the_fields_that_differ(
    store: Store, explain: Any, change: dict[str, Any], field: str
) -> None:
    """The server at hand has its namespace in the store, with other prompts."""
    put(store, hashes=[format(i, "064x") for i in range(3)])
    other = space(**change)
    put(store, target=other, drafts=[])
    code, text = verdict(explain("--namespace", TARGET.digest, "--json"))
    assert code == "other_namespace"
    assert f"None of the 10 pages is stored in {TARGET.digest[:12]} (org/target)." in text
    assert f"10 of the pages are stored in {other.digest[:12]} (org/target); it differs in" in text
    assert field in text


def test_a_model_that_stores_nothing_is_answered_with_those_that_do(
    store: Store, explain: Any
) -> None:
    put(store)
    code, text = verdict(explain("--model", "org/targt", "--json"))
    assert code == "no_such_namespace"
    assert "fits 'org/targt'" in text
    assert "(org/target): mha bfloat16, 4 tokens, 2 layers, token_layer" in text
    assert "10 of the pages are stored in" in text


def test_another_page_size_is_said_with_those_that_are_stored(
    store: Store, run: Run, url: str, tokens: Path
) -> None:
    put(store)
    ran = run("explain", url, "--tokens", tokens, "--page-size", 8, "--mode", "pairs", "--json")
    code, text = verdict(ran)
    assert code == "other_page_size"
    assert "Only pages of other sizes are stored: 4 tokens, not 8." in text
    assert "--mode pairs --page-size 4, 10 of 10 pages are stored" in text


def test_the_other_way_of_hashing_is_tried(store: Store, run: Run, url: str, tokens: Path) -> None:
    put(store)
    ran = run("explain", url, "--tokens", tokens, "--page-size", 4, "--mode", "tokens", "--json")
    code, text = verdict(ran)
    assert code == "not_stored"
    assert "Hashed with --mode pairs --page-size 4, 10 of 10 pages are stored" in text


@pytest.mark.parametrize("form", ["json", "words", "commas", "stdin"])
def test_tokens_are_read_as_json_or_numbers(
    store: Store, run: Run, url: str, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    put(store)
    text = {"json": json.dumps(TOKENS), "commas": ", ".join(map(str, TOKENS))}.get(
        form, "\n".join(map(str, TOKENS)) + "\n"
    )
    path = tmp_path / "tokens"
    path.write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    name = "-" if form == "stdin" else path
    assert run("explain", url, "--tokens", name, "--page-size", 4, "--mode", "pairs").status == 0


@pytest.mark.parametrize("bad", [0, 4, 9])
def test_a_bad_page_ends_the_run_and_is_left_as_it_is(store: Store, explain: Any, bad: int) -> None:
    put(store)
    damage(store, HASHES[bad])
    for _ in range(2):  # explain changes nothing
        ran = explain("--json")
        code, text = verdict(ran)
        assert code == "bad_page"
        assert f"Page {bad} of 10" in text
        assert "payload does not match its checksum" in text
        assert ran.document["usable_pages"] == bad
    assert store.exists(TARGET, HASHES) == 10


@pytest.mark.parametrize("lost", [[0], [3], [9], [2, 5], list(range(10))])
def test_a_lost_draft_ends_the_run_only_where_it_is_required(
    store: Store, explain: Any, lost: list[int]
) -> None:
    put(store, drafts=[i for i in range(10) if i not in lost])
    ran = explain("--pairing", "required", "--json")
    code, text = verdict(ran)
    assert code == "draft_missing"
    assert f"Page {lost[0]} of 10 is stored" in text
    assert ran.document["usable_pages"] == lost[0]
    ran = explain("--pairing", "best_effort", "--json")
    code, text = verdict(ran)
    assert (ran.status, code, ran.document["usable_pages"]) == (0, "readable", 10)
    assert len(lost) == 10 or f"only {lost[0]} page" in text
    if len(lost) < 10:
        assert (
            f"{len(lost)} of the 10 drafts are missing or bad (the first at page {lost[0]}" in text
        )
        assert ran.document["namespaces"][0]["drafts_missing"] == lost
    ran = explain("--pairing", "off", "--json")
    assert verdict(ran)[0] == "readable"
    assert "draft" not in verdict(ran)[1]


def test_a_bad_draft_counts_as_lost(store: Store, explain: Any) -> None:
    put(store)
    damage(store, f"d:{HASHES[6]}", DRAFT)
    ran = explain("--pairing", "required", "--json")
    assert verdict(ran)[0] == "draft_missing"
    assert ran.document["usable_pages"] == 6


def test_a_draft_of_another_rank_does_not_stand_in(store: Store, explain: Any) -> None:
    other = space(model="org/draft", layers=1, page_bytes=256, tp_size=2, tp_rank=1)
    put(store, draft=other)
    assert verdict(explain("--pairing", "required", "--json"))[0] == "draft_missing"


def test_a_run_below_the_engines_threshold_is_said_to_be(store: Store, explain: Any) -> None:
    put(store, targets=[0, 1, 2])
    ran = explain("--threshold-pages", 4, "--json")
    code, text = verdict(ran)
    assert code == "below_threshold"
    assert "3 pages can be read" in text
    assert "the threshold of 4" in text
    assert ran.document["usable_pages"] == 0
    assert verdict(explain("--threshold-pages", 3, "--json"))[0] == "hole"


def test_every_rank_that_holds_part_of_it_is_listed(store: Store, explain: Any) -> None:
    ranks = [space(tp_size=2, tp_rank=rank) for rank in range(2)]
    put(store, target=ranks[0], drafts=[])
    put(store, target=ranks[1], targets=[0, 1, 3], drafts=[])
    document = explain("--json").document
    assert [one["usable_pages"] for one in document["namespaces"]] == [10, 2]
    text = " ".join(document["explanation"])
    assert "holds 3 of the 10 pages, usable 2; it differs in tp_rank: 1 instead of 0." in text


def test_hashes_may_come_from_a_file(store: Store, run: Run, url: str, tmp_path: Path) -> None:
    put(store)
    path = tmp_path / "hashes"
    path.write_text("\n".join(HASHES))
    assert run("explain", url, "--hashes", f"@{path}").status == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hashes", "xyz"], "is not 16 to 128 lower-case hex digits"),
        (["--hashes", "../../etc/passwd"], "is not 16 to 128 lower-case hex digits"),
        (["--hashes", f"d:{'0' * 64}"], "without a tag"),
        (["--tokens", "TOKENS"], "--tokens needs --page-size and --mode"),
        (
            ["--tokens", "TOKENS", "--page-size", "64", "--mode", "pairs"],
            "hold no whole page of 64",
        ),
        (["--tokens", "TOKENS", "--page-size", "4"], "--mode"),
        (["--tokens", "TEXT", "--page-size", "4", "--mode", "tokens"], "expected token ids"),
        (["--hashes", "0" * 64, "--namespace", "zz"], "no namespace has a digest that begins 'zz'"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_in_one_line(
    store: Store, run: Run, url: str, tokens: Path, arguments: list[str], words: str
) -> None:
    put(store)
    text = tokens.with_name("text")
    text.write_text("the quick brown fox")
    places = {"TOKENS": str(tokens), "TEXT": str(text)}
    ran = run("explain", url, *(places.get(one, one) for one in arguments))
    assert ran.status == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err


def test_the_hashes_of_this_test_are_those_of_the_library() -> None:
    assert page_hashes(TOKENS, PAGE_SIZE, mode="pairs") == HASHES
    assert len(HASHES) == 10
