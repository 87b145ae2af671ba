"""Lookups by pool: the prefix lengths that every pool can restore, under its hit policy."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from adapters.conftest import Make
from adapters.fake_sglang import (
    MhaHostPool,
    OldPoolTransferResult,
    PoolName,
    PoolTransfer,
    StateHostPool,
    fill,
    indices,
    storage_class,
)
from adapters.storage_calls import Hashes, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_names import page_hash
from recording import RecordingBackend

MOST = 7
KEYS = [page_hash(i) for i in range(MOST)]


class Policy(str, Enum):
    """As SGLang has it: members that are texts."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


def keep(backend: RecordingBackend, tag: str, pages: set[int]) -> None:
    """Deletes all of a pool's pages but these."""
    for name in list(backend._pages):
        key = name.partition("/")[2]
        for i, page_key in enumerate(KEYS):
            if key == tag + page_key and i not in pages:
                del backend._pages[name]


@pytest.fixture
def storage(make: Make) -> Any:
    pool, indexer, states = MhaHostPool(), StateHostPool(), StateHostPool()
    for one in (pool, indexer, states):
        fill(one)
    found = make(pool)
    found.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    found.register_mem_host_pool_v2(states, PoolName.MAMBA)
    return found


def write_all(storage: Any) -> None:
    server = storage.server
    every = range(MOST)
    assert storage.batch_set_v1(KEYS, indices(server.target.pages.pool, *every)) == [True] * MOST
    for name in ("indexer", "mamba"):
        where = indices(server.get(name).pages.pool, *every)
        assert storage.batch_set_v2([PoolTransfer(name, where, KEYS)])[name] == [True] * MOST


pages = st.sets(st.integers(0, MOST - 1))


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(target=pages, indexer=pages, states=pages, window=st.integers(0, 3))
def test_a_prefix_counts_if_each_pool_has_what_its_policy_asks(
    storage: Any,
    backend: RecordingBackend,
    target: set[int],
    indexer: set[int],
    states: set[int],
    window: int,
) -> None:
    write_all(storage)
    for tag, kept in (("", target), ("indexer:", indexer), ("mamba:", states)):
        keep(backend, tag, kept)
    transfers = [
        PoolTransfer("indexer", None, None, Policy.ALL_PAGES),
        PoolTransfer(PoolName.MAMBA, None, ["x"] * window, Policy.TRAILING_PAGES),
    ]
    found = storage.batch_exists_v2(KEYS, transfers, None)
    last = max(1, window)
    wanted = [
        length
        for length in range(1, MOST + 1)
        if set(range(length)) <= target & indexer
        and set(range(max(0, length - last), length)) <= states
    ]
    assert found.restorable_prefix_pages == wanted
    assert found.kv_hit_pages == max(wanted, default=0)
    run = next((i for i in range(MOST) if i not in target), MOST)
    assert found.extra_pool_hit_pages.get("kv", 0) == run


def test_states_at_some_ends_only_are_found_at_the_last_of_them(
    storage: Any, backend: RecordingBackend
) -> None:
    write_all(storage)
    keep(backend, "mamba:", {1, 4})
    transfers = [PoolTransfer("mamba", None, None, Policy.TRAILING_PAGES)]
    found = storage.batch_exists_v2(KEYS, transfers)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 5])
    assert found.extra_pool_hit_pages == {"kv": MOST, "mamba": 5}


def test_a_pool_of_groups_never_limits_a_prefix(storage: Any, backend: RecordingBackend) -> None:
    write_all(storage)
    keep(backend, "indexer:", set())
    found = storage.batch_exists_v2(
        KEYS, [PoolTransfer("indexer", None, None, Policy.BLOCK_GROUPS)]
    )
    assert found.kv_hit_pages == MOST
    assert found.extra_pool_hit_pages == {"kv": MOST}


def test_a_pool_that_is_not_known_has_nothing(storage: Any) -> None:
    write_all(storage)
    found = storage.batch_exists_v2(KEYS, [PoolTransfer("swa", None, None, Policy.ALL_PAGES)])
    assert found.kv_hit_pages == 0


def test_states_are_asked_for_with_the_pages_before_them(
    storage: Any, backend: RecordingBackend
) -> None:
    write_all(storage)
    backend.calls.clear()
    extra = type("Extra", (), {"prefix_keys": [page_hash(99)]})()
    transfers = [PoolTransfer("mamba", None, None, Policy.TRAILING_PAGES)]
    storage.batch_exists_v2(KEYS[:3], transfers, extra)
    digest = storage.server.get("mamba").namespace.digest
    asked = {
        keys[0]: prefix for _, keys, prefix in backend.calls if keys[0].startswith(f"{digest}/")
    }
    names = [f"{digest}/mamba:{key}" for key in (page_hash(99), *KEYS)]
    assert asked == {names[i + 1]: names[: i + 1] for i in range(3)}


def test_results_stand_under_the_names_that_sglang_gave(storage: Any) -> None:
    states = storage.server.get("mamba").pages.pool
    for name in (PoolName.MAMBA, "mamba"):
        (found,) = storage.batch_set_v2([PoolTransfer(name, indices(states, 0), KEYS[:1])])
        assert found is name


def test_one_pools_failure_is_its_own(storage: Any, backend: RecordingBackend) -> None:
    write_all(storage)
    states, indexer = (storage.server.get(name).pages.pool for name in ("mamba", "indexer"))
    results = storage.batch_get_v2(
        [
            PoolTransfer("mamba", indices(states, 0), KEYS[:2]),
            PoolTransfer("indexer", indices(indexer, 5, 6), KEYS[:2]),
            PoolTransfer("swa", indices(indexer, 5, 6), KEYS[:2]),
        ]
    )
    assert results == {"mamba": [False] * 2, "indexer": [True] * 2, "swa": [False] * 2}


@pytest.mark.parametrize("result", [None, OldPoolTransferResult])
def test_a_lookups_result_has_the_fields_of_the_release(
    make: Make, hashes: Hashes, result: Any
) -> None:
    cls = storage_class(**({} if result is None else {"PoolTransferResult": result}))
    pool = MhaHostPool()
    fill(pool)
    storage = make(pool, cls=cls)
    write(storage, "in place", hashes(3), pool, [0, 1, 2])
    found = storage.batch_exists_v2(hashes(4), None, None)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (3, {"kv": 3})
    assert getattr(found, "restorable_prefix_pages", [1, 2, 3]) == [1, 2, 3]
