"""PairedStore: a target and its draft are written and read together, and counted apart."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import RecordingBackend

from hicache_storage import (
    BackendUnavailable,
    ConfigError,
    Namespace,
    PageSizeMismatch,
    PairedStore,
    Store,
)
from hicache_storage.pairing import PairCount, Pairing, PairResult, leading_run

Hashes = Callable[[int], list[str]]
OLD = 0xAB
UNAVAILABLE = BackendUnavailable("gone", backend="memory", operation="batch_get")


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture(params=["best_effort", "required"])
def pairing(request: pytest.FixtureRequest) -> Pairing:
    return request.param  # type: ignore[no-any-return]


class Pairs(PairedStore):
    """Pairs of one repeated byte: the page's number, plus 100 in the draft."""

    def write(self, hashes: list[str]) -> PairResult:
        count = range(len(hashes))
        return self.batch_set(
            hashes, [bytes([i]) * 512 for i in count], [bytes([100 + i]) * 256 for i in count]
        )

    def read(self, hashes: list[str]) -> tuple[PairResult, list[int], list[int]]:
        """The result, and the one byte that fills each target and draft buffer."""
        target = [bytearray([OLD]) * 512 for _ in hashes]
        draft = [bytearray([OLD]) * 256 for _ in hashes]
        result = self.batch_get(hashes, target, draft)
        fills = [[*map(set, half)] for half in (target, draft)]
        assert all(len(fill) == 1 for half in fills for fill in half), "a mixture in one page"
        return result, *([fill.pop() for fill in half] for half in fills)


@pytest.fixture
def pairs(
    backend: RecordingBackend,
    pairing: Pairing,
    target_namespace: Namespace,
    draft_namespace: Namespace,
) -> Pairs:
    return Pairs(Store(backend), target_namespace, draft_namespace, pairing=pairing)


def drafts(hashes: list[str]) -> list[str]:
    return [f"d:{page_hash}" for page_hash in hashes]


def test_a_pair_comes_back_together(pairs: Pairs, hashes: Hashes) -> None:
    assert pairs.write(hashes(4)) == PairResult([True] * 4, [True] * 4, pairs.pairing)
    result, target, draft = pairs.read(hashes(4))
    assert (result.usable_pages, result.usable_drafts) == (4, 4)
    assert (target, draft) == ([0, 1, 2, 3], [100, 101, 102, 103])


def test_the_draft_is_written_first_and_the_target_last(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes
) -> None:
    pairs.write(hashes(3))
    assert backend.requests("batch_set") == [drafts(hashes(3)), hashes(3)]


def test_pages_lie_under_the_hash_and_under_d_and_the_hash(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes
) -> None:
    pairs.write(hashes(1))
    names = {page.key for page in pairs.store.scan()}
    (page_hash,) = hashes(1)
    assert pairs.draft is not None
    assert names == {f"{pairs.target.digest}/{page_hash}", f"{pairs.draft.digest}/d:{page_hash}"}


@given(
    lost=st.sets(st.integers(0, 7)), lost_drafts=st.sets(st.integers(0, 7)), required=st.booleans()
)
def test_whatever_is_lost_the_usable_run_is_right_and_no_old_byte_is_presented(
    lost: set[int], lost_drafts: set[int], required: bool
) -> None:
    space = Namespace(
        model="m", pool="opaque", dtype="uint8", page_size=4, page_bytes=512, layers=1, heads=1,
        head_dim=1, v_head_dim=0, order="opaque",
    )  # fmt: skip
    keys = [f"{i:064x}" for i in range(8)]
    pairs = Pairs(
        Store(RecordingBackend()),
        space,
        dataclasses.replace(space, page_bytes=256),
        pairing="required" if required else "best_effort",
    )
    pairs.write(keys)
    assert pairs.draft is not None
    pairs.store.delete(pairs.target, [keys[i] for i in lost])
    pairs.store.delete(pairs.draft, drafts([keys[i] for i in lost_drafts]))
    result, target, draft = pairs.read(keys)

    run = min(lost, default=8)
    assert result.target == [i not in lost for i in range(8)]
    assert result.draft == [i < run and i not in lost_drafts for i in range(8)]
    usable = min(run, min(lost_drafts, default=8)) if required else run
    assert result.usable_pages == usable == pairs.exists(keys).usable
    for i in range(usable):
        assert target[i] == i
        assert draft[i] == (0 if i in lost_drafts else 100 + i)


def test_a_draft_lost_between_lookup_and_read_cuts_the_run_only_if_required(
    pairs: Pairs, hashes: Hashes
) -> None:
    for lost, usable in ((5, 5), (0, 0)):
        pairs.write(hashes(8))
        assert pairs.exists(hashes(8)).usable == 8
        assert pairs.draft is not None
        pairs.store.delete(pairs.draft, drafts(hashes(8)[lost : lost + 1]))
        result, _, _ = pairs.read(hashes(8))
        assert result.draft == [i != lost for i in range(8)]
        assert result.usable_pages == (8 if pairs.pairing == "best_effort" else usable)


def test_drafts_behind_the_first_target_miss_are_not_asked_for(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes
) -> None:
    pairs.write(hashes(4))
    pairs.store.delete(pairs.target, hashes(3)[2:])
    backend.calls.clear()
    pairs.read(hashes(4))
    assert backend.requests("batch_get") == [hashes(4), drafts(hashes(2))]


def test_a_lookup_asks_for_drafts_only_if_they_are_required(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes
) -> None:
    pairs.write(hashes(2))
    backend.calls.clear()
    count = pairs.exists(hashes(2))
    asked = backend.requests("exists")
    if pairs.pairing == "required":
        in_turn = [key for both in zip(hashes(2), drafts(hashes(2)), strict=True) for key in both]
        assert (count.draft, asked) == (2, [in_turn])
    else:
        assert (count.draft, asked) == (None, [hashes(2)])


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("missing", list(itertools.product([None, 0, 1, 3], repeat=2)))
def test_a_lookup_counts_the_leading_runs_of_both_halves(
    pairs: Pairs,
    backend: RecordingBackend,
    hashes: Hashes,
    missing: tuple[int | None, int | None],
    before: int,
) -> None:
    prefix, asked = hashes(before + 4)[:before], hashes(before + 4)[before:]
    pairs.write([*prefix, *asked])
    for half, keys, page in zip(
        (pairs.target, pairs.draft), (asked, drafts(asked)), missing, strict=True
    ):
        if page is not None:
            assert half is not None
            pairs.store.delete(half, [keys[page]])
    target, draft = (4 if page is None else page for page in missing)
    backend.calls.clear()
    count = pairs.exists(asked, prefix or None)
    if pairs.pairing == "required":
        assert count == PairCount(target, min(target, draft), min(target, draft))
        assert len(backend.calls) == (2 if draft < min(target, 3) else 1)
    else:
        assert count == PairCount(target, None, target)
    for _, keys, prefix_keys in backend.calls:
        first = asked.index(keys[0].partition("/")[2])
        known = [key.rpartition(":")[2].rpartition("/")[2] for key in prefix_keys or ()]
        assert list(dict.fromkeys(known)) == ([*prefix, *asked[:first]] if prefix or first else [])


def test_a_refused_draft_costs_the_target_only_if_required(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes
) -> None:
    backend.refuse.add(drafts(hashes(2))[1])
    result = pairs.write(hashes(3))
    assert result.draft == [True, False, True]
    required = pairs.pairing == "required"
    assert result.target == [True, not required, True]
    assert pairs.exists(hashes(3)).target == (1 if required else 3)


def test_a_refused_target_leaves_its_draft_reported(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes
) -> None:
    backend.refuse.add(hashes(2)[1])
    result = pairs.write(hashes(2))
    assert (result.target, result.draft) == ([True, False], [True, True])
    assert result.usable_pages == 1


@pytest.mark.parametrize("hook", ["batch_set", "batch_get"])
def test_an_unavailable_draft_half_is_reported_or_raised(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes, hook: str
) -> None:
    pairs.write(hashes(2))
    backend.fail[f"draft {hook}"] = UNAVAILABLE
    call = pairs.write if hook == "batch_set" else lambda keys: pairs.read(keys)[0]
    if pairs.pairing == "required":
        with pytest.raises(BackendUnavailable):
            call(hashes(2))
        return
    result = call(hashes(2))
    assert (result.target, result.draft) == ([True] * 2, [False] * 2)
    assert result.draft_error is UNAVAILABLE


def test_an_unavailable_target_half_is_raised(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes
) -> None:
    pairs.write(hashes(2))
    backend.fail["batch_get"] = UNAVAILABLE
    with pytest.raises(BackendUnavailable):
        pairs.read(hashes(2))


def test_without_a_draft_pool_no_draft_is_asked_for_and_its_count_is_off_not_zero(
    backend: RecordingBackend, target_namespace: Namespace, hashes: Hashes, pairing: Pairing
) -> None:
    pairs = PairedStore(Store(backend), target_namespace, pairing=pairing)
    pages = [bytes(512)] * 2
    assert pairs.batch_set(hashes(2), pages).draft is None
    result = pairs.batch_get(hashes(2), [bytearray(512) for _ in range(2)])
    assert (result.draft, result.usable_pages, result.usable_drafts) == (None, 2, 0)
    assert pairs.exists(hashes(2)).draft is None
    assert pairs.delete(hashes(2)) == [True] * 2
    assert not any("d:" in key for _, keys, _ in backend.calls for key in keys)
    with pytest.raises(ConfigError, match="no draft namespace"):
        pairs.batch_set(hashes(2), pages, pages)


def test_a_draft_page_of_another_geometry_is_a_miss(
    backend: RecordingBackend, target_namespace: Namespace, draft_namespace: Namespace,
    hashes: Hashes,
) -> None:  # fmt: skip
    store = Store(backend)
    Pairs(store, target_namespace, draft_namespace).write(hashes(2))
    two_layers = dataclasses.replace(draft_namespace, layers=2, page_bytes=512)
    wider = PairedStore(store, target_namespace, two_layers)
    draft = [bytearray([OLD]) * 512 for _ in range(2)]
    result = wider.batch_get(hashes(2), [bytearray(512) for _ in range(2)], draft)
    assert (result.target, result.draft) == ([True] * 2, [False] * 2)
    assert draft == [bytes(512)] * 2


def test_prefix_hashes_reach_both_halves_under_their_own_keys(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes
) -> None:
    prefix, keys = hashes(3)[:2], hashes(3)[2:]
    pairs.batch_set(keys, [bytes(512)], [bytes(256)], prefix)
    assert pairs.draft is not None
    assert [call[2] for call in backend.calls] == [
        [f"{pairs.draft.digest}/{key}" for key in drafts(prefix)],
        [f"{pairs.target.digest}/{key}" for key in prefix],
    ]


@pytest.mark.parametrize(("target", "draft"), [(1, 2), (2, 1), (3, 2)])
def test_counts_that_do_not_fit_are_refused_before_any_byte_moves(
    pairs: Pairs, backend: RecordingBackend, hashes: Hashes, target: int, draft: int
) -> None:
    for verb in (pairs.batch_set, pairs.batch_get):
        with pytest.raises(PageSizeMismatch, match="2 hashes but"):
            verb(
                hashes(2),
                [bytearray(512) for _ in range(target)],
                [bytearray(256) for _ in range(draft)],
            )
    assert backend.calls == []


def test_a_configuration_that_cannot_pair_is_refused(
    backend: RecordingBackend, target_namespace: Namespace, draft_namespace: Namespace
) -> None:
    other_size = dataclasses.replace(draft_namespace, page_size=8)
    with pytest.raises(ConfigError, match="draft pages have 8 tokens and target pages 4"):
        PairedStore(Store(backend), target_namespace, other_size)
    with pytest.raises(ConfigError, match="must be 'best_effort' or 'required', got 'always'"):
        PairedStore(Store(backend), target_namespace, pairing="always")  # type: ignore[arg-type]


def test_deleting_a_pair_deletes_both_halves(pairs: Pairs, hashes: Hashes) -> None:
    pairs.write(hashes(3))
    assert pairs.delete(hashes(2)) == [True, True]
    assert len(list(pairs.store.scan())) == 2


@given(st.lists(st.booleans(), max_size=12))
def test_leading_run_stops_at_the_first_miss(hits: list[bool]) -> None:
    run = leading_run(hits)
    assert all(hits[:run])
    assert run == len(hits) or not hits[run]
