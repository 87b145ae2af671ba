"""PageAllocator: every slot has one owner, and a handle owns no more than itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pools.pool_cases import slots

from hicache_storage import PageSizeMismatch
from hicache_storage.pools.allocator import PageAllocator

PAGES = 9


def test_a_kept_handle_holds_no_more_memory_than_its_own_slots() -> None:
    allocator = PageAllocator(1_000_000)
    kept = []
    for round_ in range(10_000):
        handle = allocator.alloc(1)
        assert handle is not None
        if round_ % 100 == 0:
            kept.append(handle)
        else:
            allocator.free(handle)
    assert len(kept) == 100
    for handle in kept:
        assert handle.untyped_storage().nbytes() == 8
        base = handle.numpy().base
        assert base is None or base.nbytes == 8, "no view of anything larger"
    assert allocator.available == 1_000_000 - 100


def test_a_changed_handle_changes_no_allocator() -> None:
    allocator = PageAllocator(4)
    first = allocator.alloc(2)
    assert first is not None
    first += 100
    rest = allocator.alloc(2)
    assert rest is not None
    assert sorted(rest.tolist()) == [2, 3]


def test_too_few_free_pages_give_none_and_take_none() -> None:
    allocator = PageAllocator(4)
    assert allocator.alloc(5) is None
    assert allocator.available == 4
    taken = allocator.alloc(4)
    assert taken is not None
    assert (taken.dtype, tuple(taken.shape)) == (torch.int64, (4,))
    assert allocator.alloc(1) is None


def test_no_pages_can_be_had_and_given_back() -> None:
    allocator = PageAllocator(1)
    nothing = allocator.alloc(0)
    assert nothing is not None
    assert (nothing.dtype, tuple(nothing.shape)) == (torch.int64, (0,))
    allocator.free(nothing)
    assert allocator.available == 1


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (slots([0, 1, 3]), "page 3 is freed, but it is free already"),
        (slots([0, 0]), "given twice"),
        (slots([0, 4]), "page 4 is outside of the pool's 4 pages"),
        (slots([0, -1]), "page -1 is outside"),
        (slots([0]).int(), r"got torch.int32 of shape \(1,\)"),
        (slots([0]).double(), "torch.float64"),
        (slots([0]).bool(), "torch.bool"),
        (slots([0, 1]).view(1, 2), r"shape \(1, 2\)"),
        (torch.tensor(0), r"shape \(\)"),
        ([0, 1], "got list"),
        (None, "got NoneType"),
    ],
)
def test_what_was_not_allocated_cannot_be_freed_and_nothing_is(wrong: Any, match: str) -> None:
    allocator = PageAllocator(4)
    taken = allocator.alloc(3)
    assert taken is not None
    assert taken.tolist() == [0, 1, 2]
    with pytest.raises(PageSizeMismatch, match=match):
        allocator.free(wrong)
    assert allocator.available == 1
    allocator.free(taken)
    assert allocator.available == 4


def test_a_page_is_freed_once() -> None:
    allocator = PageAllocator(4)
    taken = allocator.alloc(2)
    assert taken is not None
    allocator.free(taken)
    with pytest.raises(PageSizeMismatch, match="free already"):
        allocator.free(taken)
    assert allocator.available == 4


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(PageSizeMismatch, match="-1 pages"):
        PageAllocator(4).alloc(-1)


def test_threads_never_get_the_same_page() -> None:
    allocator = PageAllocator(64)
    owned: set[int] = set()
    clashes: list[int] = []

    def work() -> None:
        for _ in range(300):
            handle = allocator.alloc(5)
            if handle is None:
                continue
            for page in handle.tolist():
                if page in owned:
                    clashes.append(page)
                owned.add(page)
            owned.difference_update(handle.tolist())
            allocator.free(handle)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not clashes
    assert allocator.available == 64


class AllocatorMachine(RuleBasedStateMachine):
    """Against a plain set of owned slots."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.handles: list[torch.Tensor] = []

    @rule(count=st.integers(0, PAGES + 1))
    def alloc(self, count: int) -> None:
        owned = {page for handle in self.handles for page in handle.tolist()}
        handle = self.allocator.alloc(count)
        assert (handle is None) is (count > PAGES - len(owned))
        if handle is not None:
            fresh = handle.tolist()
            assert len(set(fresh)) == count
            assert not owned & set(fresh)
            assert all(0 <= page < PAGES for page in fresh)
            self.handles.append(handle)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.handles:
            self.allocator.free(self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1))))

    @rule(data=st.data())
    def free_some_of_each(self, data: st.DataObject) -> None:
        """Pages come back in any grouping."""
        pages = [page for handle in self.handles for page in handle.tolist()]
        given_back = data.draw(st.permutations(pages))[: len(pages) // 2]
        self.allocator.free(slots(given_back))
        rest = [page for page in pages if page not in given_back]
        self.handles = [slots(rest)] if rest else []

    @invariant()
    def every_page_is_somewhere(self) -> None:
        assert self.allocator.available + sum(map(len, self.handles)) == PAGES


TestAllocatorMachine = AllocatorMachine.TestCase


@given(st.integers(1, 20))
def test_a_fresh_pool_is_handed_out_from_the_front(pages: int) -> None:
    taken = PageAllocator(pages).alloc(pages)
    assert taken is not None
    assert taken.tolist() == list(range(pages))
