"""A capacity is kept, by several processes together, and costs a batch none of its own pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from backends.lmdb_rig import (
    HELD,
    PAGE,
    Child,
    check_consistency,
    file_bytes,
    key,
    opened,
    page,
    store,
    there,
)

from hicache_storage.backends.lmdb import backend as backend_module
from hicache_storage.backends.lmdb.writing import Writer

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("pages_a_part", [3, 100])
def test_a_batch_never_evicts_its_own_pages_for_its_rest(
    tmp_path: Path, pages_a_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever parts Store writes it. What has no room once isn't tried for again."""
    monkeypatch.setattr(backend_module, "BY_THREADS_BYTES", 1)
    monkeypatch.setattr(backend_module, "WRITTEN_BYTES", pages_a_part * HELD)
    backend = opened(tmp_path, capacity=8 * HELD, recency_s=0)
    tried = []
    evict = Writer._evict
    monkeypatch.setattr(Writer, "_evict", lambda *args: tried.append(args) or evict(*args))

    def stored(numbers: Sequence[int]) -> list[bool]:
        answers: list[bool] = []

        def write(part: slice) -> None:
            answers.extend(store(backend, numbers[part], PAGE))

        backend.spread("batch_set", HELD, len(numbers), write)
        return answers

    assert stored(range(100, 106)) == [True] * 6
    assert stored(range(20)) == [True] * 8 + [False] * 12
    assert there(backend, range(20)) == list(range(8))
    assert len(tried) <= 1
    # Those found stored count as the batch's own too.
    assert stored([*range(8), 30]) == [True] * 8 + [False]
    assert there(backend, range(31)) == list(range(8))
    check_consistency(backend)
    backend.close()


def test_a_page_larger_than_the_capacity_is_refused_and_costs_no_other(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=4 * HELD)
    store(backend, range(3), PAGE)
    large = page(9, 5 * PAGE)
    assert backend.batch_set([key(9), key(3)], [large, page(3, PAGE)]) == [False, True]
    assert there(backend, range(10)) == [0, 1, 2, 3]
    backend.close()


def test_replacing_a_page_in_a_full_store_frees_the_old_one_first(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=4 * HELD)
    for number in range(4):
        store(backend, [number], PAGE)
        time.sleep(0.002)
    for number in (0, 3, 1):
        assert backend.batch_set([key(number)], [page(100 + number, PAGE)]) == [True]
    assert there(backend, range(4)) == [0, 1, 2, 3]
    assert backend.usage().stored_bytes == 4 * HELD
    check_consistency(backend)
    backend.close()


def test_a_smaller_capacity_is_kept_from_the_next_batch_on(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    store(backend, range(40), PAGE)
    backend.close()
    backend = opened(tmp_path, capacity=10 * HELD)
    assert backend.usage().capacity_bytes == 10 * HELD
    assert store(backend, [50], PAGE) == [True]
    assert backend.usage().stored_bytes <= 10 * HELD
    assert there(backend, range(51)) == [*range(31, 40), 50]
    backend.close()


def test_the_file_of_a_full_store_stays_near_its_capacity(tmp_path: Path) -> None:
    capacity = 16 * MIB
    backend = opened(tmp_path, capacity=capacity, durability="async", map_size=MIB)
    for start in range(0, 4000, 50):
        assert all(store(backend, range(start, start + 50), 64 * KIB))
        assert backend.usage().stored_bytes <= capacity
    assert file_bytes(tmp_path) < 2 * capacity
    check_consistency(backend)
    backend.close()


def test_several_processes_keep_one_capacity_together(tmp_path: Path) -> None:
    children = [
        Child(
            f"""
            backend = opened(sys.argv[1], capacity={64 * HELD}, durability="async")
            first = int(sys.argv[2])
            for start in range(first, first + 400, 8):
                assert store(backend, range(start, start + 8), {PAGE}) == [True] * 8
                assert backend.usage().stored_bytes <= {64 * HELD}
            backend.close()
            """,
            tmp_path,
            first,
        )
        for first in (0, 10_000, 20_000)
    ]
    for child in children:
        with child:
            child.end()
    backend = opened(tmp_path)
    assert check_consistency(backend) <= 64
    backend.close()


def test_a_batch_is_not_refused_because_others_wrote_while_it_waited(tmp_path: Path) -> None:
    """Its pages count as used when they are written, not when the call began."""
    backend = opened(tmp_path, capacity=8 * HELD)
    with Child(
        f"""
        backend = opened(sys.argv[1], capacity={8 * HELD})
        with backend.environment.writing() as (txn, trees):
            print("writing", flush=True)
            sys.stdin.readline()
            changes = Changes(txn, trees, 4096)
            for number in range(100, 108):
                changes.put(key(number).encode(), page(number, {PAGE}), now_ms(), Scratch())
            changes.finish()
        backend.close()
        """.replace(
            "backend =",
            "from hicache_storage.backends.lmdb.records import Changes, Scratch; "
            "from hicache_storage.backends.lmdb.recency import now_ms; backend =",
            1,
        ),
        tmp_path,
    ) as other:
        assert other.line() == "writing"
        answers: list[list[bool]] = []
        waiting = threading.Thread(target=lambda: answers.append(store(backend, range(6), PAGE)))
        waiting.start()
        time.sleep(0.3)
        other.tell()
        waiting.join(30)
        other.end()
    assert answers == [[True] * 6]
    assert there(backend, range(6)) == list(range(6))
    backend.close()
