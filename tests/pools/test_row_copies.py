"""Few and large copies: the same bytes as page by page, whatever the strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools.pool_cases import MHA
from pools.simulated_lane import as_slots, copy_rows

from hicache_storage.pools import row_copies
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import LAYOUTS
from hicache_storage.pools.row_copies import runs, view_copies


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Two views of pages of one shape, dimensions in any order of memory, gaps between them."""
    shape = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 4)))]
    pages = [draw(st.integers(1, 6)) for _ in range(2)]
    count = draw(st.integers(0, min(pages)))
    ends = []
    for page_count in pages:
        whole = [page_count, *shape]
        order = draw(st.permutations(range(len(whole))))
        gaps = [draw(st.integers(0, 1)) for _ in whole]
        memory = torch.zeros([whole[i] + gaps[i] for i in order], dtype=torch.uint8)
        back = [order.index(i) for i in range(len(whole))]
        view = memory.permute(back)[tuple(slice(0, size) for size in whole)]
        ends.append(view)
    slots = [draw(st.permutations(range(n)))[:count] for n in pages]
    return ends[0], ends[1], slots[0], slots[1]


def storage_bytes(view: torch.Tensor) -> torch.Tensor:
    """All memory behind a view, gaps included."""
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())


@given(views(), st.integers(1, 40))
def test_any_two_views_are_copied_exactly_and_nothing_between(
    case: tuple[torch.Tensor, torch.Tensor, list[int], list[int]], longest_pitch: int
) -> None:
    source, target, source_slots, target_slots = case
    source.copy_(torch.randint(1, 255, source.shape, dtype=torch.uint8))
    memory = storage_bytes(target)
    memory.fill_(255)
    expected = memory.clone().as_strided(target.shape, target.stride(), target.storage_offset())
    expected[target_slots] = source[source_slots]
    ours, theirs = as_slots(source_slots), as_slots(target_slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_copies, "_LONGEST_PITCH", longest_pitch)
        row_copies._piece.cache_clear()
        found = view_copies(source, target, ours, theirs, runs(ours, theirs))
        row_copies._piece.cache_clear()
    copy_rows(found)
    everything = storage_bytes(expected)
    assert torch.equal(memory, everything)
    for piece in found:
        assert max(piece.source_pitch, piece.target_pitch) <= max(longest_pitch, piece.width)


def test_runs_are_pages_that_follow_each_other_at_both_ends() -> None:
    found = runs(as_slots([3, 4, 5, 7, 8, 0]), as_slots([0, 1, 5, 6, 7, 8]))
    assert found.start.tolist() == [0, 2, 3, 5]
    assert found.length.tolist() == [2, 1, 2, 1]
    assert len(runs(as_slots([]), as_slots([])).start) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_needs_one_copy_a_part(layout: str) -> None:
    """Also where its layers lie apart: then they are rows of one copy."""
    host, area = HostPool(MHA, 9, layout), HostPool(MHA, 4, layout)  # type: ignore[arg-type]
    some, places = as_slots([7, 2, 5]), as_slots([0, 1, 2])
    for part in range(2):
        found = view_copies(
            host.page_rows(part), area.page_rows(part), some, places, runs(some, places)
        )
        assert sum(len(piece.source) for piece in found) == 3
        assert {piece.height for piece in found} == {2 if layout == "layer_first" else 1}


def test_pages_that_cannot_be_joined_are_copies_of_one_shape() -> None:
    """Some layers of layer-token pages: rows that lie apart would be slower, and several shapes
    more calls."""
    host, area = HostPool(MHA, 9, "page_first_direct"), HostPool(MHA, 9, "page_first_direct")
    some, places = as_slots([2, 3, 4, 7]), as_slots([0, 1, 2, 3])
    ends = [pool.page_rows(0)[:, :1] for pool in (host, area)]
    (piece,) = view_copies(ends[0], ends[1], some, places, runs(some, places))
    assert (len(piece.source), piece.height) == (4, 1)
    joined = [pool.page_rows(0) for pool in (host, area)]
    found = view_copies(joined[0], joined[1], some, places, runs(some, places))
    assert sorted(len(piece.source) * piece.width for piece in found) == [
        joined[0][0].numel(),
        3 * joined[0][0].numel(),
    ]


def test_addresses_stay_in_order_for_the_driver() -> None:
    host, area = HostPool(MHA, 4), HostPool(MHA, 4)
    some = as_slots([3, 1])
    (piece,) = view_copies(host.page_rows(0), area.page_rows(0), some, some, runs(some, some))
    assert piece.source.dtype == piece.target.dtype == np.uint64
    assert piece.source.flags["C_CONTIGUOUS"]
    assert piece.target.flags["C_CONTIGUOUS"]
