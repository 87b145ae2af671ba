"""Moves: what the order of pages says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools.simulated_lane import as_slots

from hicache_storage.pools.moves import Moves


@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(1, 12))
def test_runs_are_counted_as_pages_are_given(
    device: list[int], host: list[int], count: int
) -> None:
    device, host = device[:count], host[:count]
    moves = Moves(as_slots(device), as_slots(host))
    in_host = [after == before + 1 for before, after in itertools.pairwise(host)]
    on_device = [after == before + 1 for before, after in itertools.pairwise(device)]
    assert moves.run_pages() == count / (1 + in_host.count(False))
    both = [a and b for a, b in zip(in_host, on_device, strict=True)]
    assert moves.run_pages(both_ends=True) == count / (1 + both.count(False))


@pytest.mark.parametrize("both_ends", [False, True])
def test_the_first_pages_say_how_long_runs_are(both_ends: bool) -> None:
    """Of 16384 pages it would take longer than what it is for."""
    slots = np.concatenate((np.arange(1024), 1024 + 2 * np.arange(15 << 10)))
    assert Moves(slots, slots).run_pages(both_ends=both_ends) == 1024
    assert Moves(slots[::-1], slots[::-1]).run_pages(both_ends=both_ends) == 1


def test_pages_are_put_in_the_order_of_the_host_pool() -> None:
    moves = Moves(as_slots([4, 9, 0, 5]), as_slots([7, 1, 3, 8])).in_order
    assert moves.host.tolist() == [1, 3, 7, 8]
    assert moves.device.tolist() == [9, 0, 4, 5]
    assert moves.runs.start.tolist() == [0, 1, 2]
    assert moves.runs.length.tolist() == [1, 1, 2]
