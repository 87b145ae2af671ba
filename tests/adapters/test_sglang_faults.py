"""Faults of storage, wrong arguments and holes: full answers, and no byte moves elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters.conftest import Make
from adapters.fake_sglang import MhaHostPool, PoolTransfer, fill, indices, page_bytes
from adapters.storage_calls import WAYS, Hashes, pair, read, write, write_pairs
from recording import RecordingBackend

from hicache_storage import BackendTimeout

FAULTS = [
    BackendTimeout("slow", backend="memory", operation="x"),
    OSError(5, "I/O error"),
    ValueError("a bug"),
    MemoryError(),
]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_no_error_of_storage_reaches_a_thread_of_the_engine(
    make: Make, hashes: Hashes, backend: RecordingBackend, error: Exception
) -> None:
    storage, pool, draft = pair(make)
    write_pairs(storage, pool, draft, hashes(2))
    hooks = ("batch_set", "batch_get", "exists")
    backend.fail = dict.fromkeys((*hooks, *(f"draft {hook}" for hook in hooks)), error)
    where = indices(pool, 0, 1)
    flat = [pool.get_data_page(0), pool.get_data_page(4)]
    transfers = [PoolTransfer("draft", indices(draft, 0, 1), hashes(2))]
    assert storage.batch_exists(hashes(2), None) == 0
    assert storage.batch_exists_v2(hashes(2), transfers).kv_hit_pages == 0
    assert storage.batch_set(hashes(2), flat) is False
    assert storage.batch_get(hashes(2), flat) == [None, None]
    assert storage.batch_set_v1(hashes(2), where, None) == [False, False]
    assert storage.batch_get_v1(hashes(2), where, None) == [False, False]
    assert storage.write_drafts(hashes(2), where) == [False, False]
    assert storage.read_drafts(hashes(2), where) == [False, False]
    fill(draft, seed=1)
    assert storage.batch_set_v2(transfers) == {"draft": [False, False]}
    assert storage.batch_get_v2(transfers) == {"draft": [False, False]}
    storage.clear()
    backend.fail.clear()
    assert storage.batch_exists(hashes(2), None) == 0  # cleared
    fill(draft, seed=1)
    write_pairs(storage, pool, draft, hashes(2))
    assert storage.batch_exists(hashes(2), None) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda s, k: s.batch_set(k, None),
        lambda s, k: s.batch_set(k, [torch.zeros(3)]),
        lambda s, k: s.batch_set(k, [torch.zeros(3)] * 3),
        lambda s, k: s.batch_set(k, ["x"] * 3),
        lambda s, k: any(t is not None for t in s.batch_get(k, None)),
        lambda s, k: any(t is not None for t in s.batch_get(k, [torch.zeros(8)] * 2)),
        lambda s, k: any(s.batch_set_v1(k, torch.arange(8), None)),
        lambda s, k: any(s.batch_get_v1(k, torch.arange(11), None)),
        lambda s, k: any(s.batch_get_v1(k, None, None)),
        lambda s, k: any(s.batch_get_v1([7, None, "x"], torch.arange(12), None)),
        lambda s, k: any(s.read_drafts(k, torch.arange(12))),
        lambda s, k: any(s.write_drafts(k, torch.arange(12))),
        lambda s, k: any(s.batch_set_v2([PoolTransfer("kv", torch.arange(8), k)])["kv"]),
        lambda s, k: any(s.batch_get_v2([PoolTransfer("kv", None, k)])["kv"]),
        lambda s, k: any(s.batch_get_v2([PoolTransfer("?!", torch.arange(12), k)])["?!"]),
        lambda s, k: s.batch_exists([None, 7]),
    ],
)
def test_arguments_that_do_not_fit_move_no_byte_and_raise_nothing(
    make: Make, hashes: Hashes, backend: RecordingBackend, call: Any
) -> None:
    pool = MhaHostPool()
    fill(pool)
    storage = make(pool)
    write(storage, "in place", hashes(3), pool, [0, 1, 2])
    before = [page_bytes(pool, page) for page in range(8)]
    stored = dict(backend._pages)
    assert not call(storage, hashes(3))
    assert [page_bytes(pool, page) for page in range(8)] == before
    assert {name: page[0] for name, page in backend._pages.items()} == {
        name: page[0] for name, page in stored.items()
    }
    assert read(storage, "in place", hashes(3), pool, [3, 4, 5]) == [True] * 3


def test_answers_have_the_length_and_order_of_the_keys_with_a_hole(
    make: Make, hashes: Hashes, backend: RecordingBackend
) -> None:
    pool = MhaHostPool()
    fill(pool)
    storage = make(pool)
    write(storage, "in place", hashes(5), pool, [0, 1, 2, 3, 4])
    for name in [name for name in backend._pages if name.endswith(hashes(5)[2])]:
        del backend._pages[name]
    for way in WAYS:
        assert (
            read(storage, way, hashes(5), pool, [0, 1, 2, 3, 4])
            == [True] * 2 + [False] + [True] * 2
        )
