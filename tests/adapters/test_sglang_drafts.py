"""Drafts beside their targets: what a lost one costs, and which rank writes them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from adapters.conftest import Make
from adapters.fake_sglang import (
    MhaHostPool,
    MlaHostPool,
    PoolName,
    PoolTransfer,
    fill,
    indices,
    page_bytes,
    storage_class,
)
from adapters.storage_calls import WAYS, Hashes, pair, read, write, write_pairs
from recording import RecordingBackend

from hicache_storage.adapters import sglang_storage


@pytest.mark.parametrize(
    ("pairing", "told", "usable"),
    [
        ("auto", True, 2),
        ("required", True, 2),
        ("best_effort", True, 4),
        ("auto", False, 4),
        ("required", False, 2),
        ("best_effort", False, 4),
    ],
)
def test_a_lost_draft_page_costs_what_pairing_says(
    make: Make,
    hashes: Hashes,
    backend: RecordingBackend,
    caplog: pytest.LogCaptureFixture,
    pairing: str,
    told: bool,
    usable: int,
) -> None:
    pool, draft = MhaHostPool(), MhaHostPool(layers=1)
    fill(pool)
    fill(draft, seed=1)
    storage = make(pool, {"pairing": pairing})
    if told:
        storage.register_draft_host_pool(draft)
    write_pairs(storage, pool, draft, hashes(4))
    (lost,) = [name for name in backend._pages if name.endswith("d:" + hashes(4)[2])]
    del backend._pages[lost]
    with caplog.at_level(logging.WARNING):
        assert storage.batch_exists(hashes(5), None) == usable
    assert ("only 2 with their drafts" in caplog.text) is (usable == 2)


@pytest.mark.parametrize("pairing", ["required", "best_effort"])
@pytest.mark.parametrize("way", ["flat", "by pool", "in place"])
def test_a_lost_draft_page_is_zeros_never_what_was_in_its_slot(
    make: Make, hashes: Hashes, backend: RecordingBackend, pairing: str, way: str
) -> None:
    storage, pool, draft = pair(make, {"pairing": pairing})
    write_pairs(storage, pool, draft, hashes(4))
    wanted = [page_bytes(draft, page) for page in range(4)]
    backend.replace("d:" + hashes(4)[1], b"\xee" * 320)  # of the right length, and damaged
    draft.kv_buffer.fill_(float("nan"))
    if way == "by pool":
        where = indices(draft, 4, 5, 6, 7)
        hits = storage.batch_get_v2([PoolTransfer("draft", where, hashes(4))])["draft"]
        assert hits == [True, pairing == "best_effort", True, True]
    elif way == "in place":
        where = indices(draft, 4, 5, 6, 7)
        assert storage.read_drafts(hashes(4), where) == [True, False, True, True]
    else:
        keys = [f"{key}.draft" for key in hashes(4)]
        dummies = [torch.full_like(draft.get_dummy_flat_data_page(), 7.0) for _ in keys]
        for page, tensor in enumerate(storage.batch_get(keys, dummies), 4):
            assert tensor is not None
            draft.set_from_flat_data_page(page * 4, tensor)
    found = [page_bytes(draft, page) for page in range(4, 8)]
    assert found == [wanted[0], bytes(256), wanted[2], wanted[3]]
    assert storage.server.lost_drafts == 1


@pytest.mark.parametrize("pairing", ["required", "best_effort"])
@pytest.mark.parametrize("drafts", ["flat", "in place"])
@pytest.mark.parametrize("way", ["flat", "in place"])
def test_a_draft_lost_after_the_lookup_costs_its_target_only_if_it_is_required(
    make: Make, hashes: Hashes, backend: RecordingBackend, pairing: str, way: str, drafts: str
) -> None:
    storage, pool, draft = pair(make, {"pairing": pairing})
    write_pairs(storage, pool, draft, hashes(4))
    assert storage.batch_exists(hashes(4), None) == 4
    for name in [name for name in backend._pages if name.endswith("d:" + hashes(4)[2])]:
        del backend._pages[name]

    def prefetch() -> list[bool]:
        if drafts == "in place":
            storage.read_drafts(hashes(4), indices(draft, 4, 5, 6, 7))
        else:
            dummies = [draft.get_dummy_flat_data_page() for _ in hashes(4)]
            storage.batch_get([f"d:{key}" for key in hashes(4)], dummies)
        return read(storage, way, hashes(4), pool, [4, 5, 6, 7])

    assert prefetch() == [True, True, pairing == "best_effort", True]
    write_pairs(storage, pool, draft, hashes(4))
    assert prefetch() == [True] * 4


def test_a_lost_draft_costs_its_target_once_and_not_for_ever(
    make: Make, hashes: Hashes, backend: RecordingBackend
) -> None:
    storage, pool, draft = pair(make)
    write_pairs(storage, pool, draft, hashes(2))
    for name in [name for name in backend._pages if "/d:" in name]:
        del backend._pages[name]
    storage.read_drafts(hashes(2), indices(draft, 0, 1))
    assert storage.batch_get_v1(hashes(2), indices(pool, 0, 1)) == [False, False]
    assert storage.batch_get_v1(hashes(2), indices(pool, 0, 1)) == [True, True]


@pytest.mark.parametrize(("pairing", "usable"), [("required", 2), ("best_effort", 4)])
def test_a_lookup_by_pool_is_limited_by_drafts_only_if_they_are_required(
    make: Make,
    hashes: Hashes,
    backend: RecordingBackend,
    caplog: pytest.LogCaptureFixture,
    pairing: str,
    usable: int,
) -> None:
    storage, pool, draft = pair(make, {"pairing": pairing})
    write_pairs(storage, pool, draft, hashes(4))
    (lost,) = [name for name in backend._pages if name.endswith("d:" + hashes(4)[2])]
    del backend._pages[lost]
    with caplog.at_level(logging.WARNING):
        found = storage.batch_exists_v2(hashes(4), [PoolTransfer(PoolName.DRAFT)])
    assert found.kv_hit_pages == usable
    assert ("only 2 with their drafts" in caplog.text) is (usable == 2)
    assert found.extra_pool_hit_pages == {"kv": 4, "draft": usable}


@pytest.mark.parametrize("way", ["flat", "by pool", "in place"])
def test_a_draft_page_of_zeros_was_lost_once_and_is_never_stored(
    make: Make, hashes: Hashes, backend: RecordingBackend, way: str
) -> None:
    storage, _pool, draft = pair(make)
    draft.kv_buffer[:, 4:8] = 0
    if way == "flat":
        keys = [f"d:{key}" for key in hashes(3)]
        assert not storage.batch_set(keys, [draft.get_data_page(4 * i) for i in range(3)])
    elif way == "in place":
        where = indices(draft, 0, 1, 2)
        assert storage.write_drafts(hashes(3), where) == [True, False, True]
    else:
        where = indices(draft, 0, 1, 2)
        results = storage.batch_set_v2([PoolTransfer("draft", where, hashes(3))])
        assert results == {"draft": [True, False, True]}
    stored = {name.partition("/")[2] for name in backend._pages if "/n:" not in name}
    assert stored == {"d:" + hashes(3)[0], "d:" + hashes(3)[2]}


def test_without_a_draft_there_is_no_draft_traffic(
    make: Make, hashes: Hashes, backend: RecordingBackend
) -> None:
    pool = MhaHostPool()
    fill(pool)
    storage = make(pool, {"pairing": "required"})
    for way in WAYS:
        write(storage, way, hashes(2), pool, [0, 1])
        assert storage.batch_exists(hashes(2), None) == 2
        assert read(storage, way, hashes(2), pool, [0, 1]) == [True, True]
    assert not any("/d:" in key for _, keys, _ in backend.calls for key in keys)


def test_a_required_draft_of_unknown_size_is_said_once_and_nothing_is_usable(
    make: Make, hashes: Hashes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = SimpleNamespace(model_path="m", revision="1", speculative_algorithm="EAGLE3")
    monkeypatch.setattr(sglang_storage, "server_arguments", lambda: arguments)
    cls = type("Untold", (storage_class(),), {"drafts_untold": classmethod(lambda cls: True)})
    pool, draft = MhaHostPool(), MhaHostPool(layers=1)
    fill(pool)
    fill(draft)
    storage = make(pool, {"pairing": "required"}, cls=cls)
    write(storage, "in place", hashes(2), pool, [0, 1])
    with caplog.at_level(logging.WARNING):
        assert [storage.batch_exists(hashes(2), None) for _ in range(10)] == [0] * 10
    assert caplog.text.count("let SGLang load the plugin") == 1
    write_pairs(storage, pool, draft, hashes(2))  # now the size is known
    assert storage.batch_exists(hashes(2), None) == 2


def test_sharded_drafts_beside_replicated_targets_are_said_not_to_be_written(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    told = {}
    for rank in (0, 1):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            storage = make(MlaHostPool(), is_mla_model=True, tp_rank=rank, tp_size=4)
            storage.register_draft_host_pool(MhaHostPool(layers=1))
        assert "only those of rank 0 are ever written" in caplog.text
        told[rank] = [line for line in caplog.messages if "pool draft" in line]
    assert [line.endswith("; this rank writes them") for line in told[0]] == [True]
    assert [line.endswith("; no rank writes them") for line in told[1]] == [True]


def test_a_rank_writes_its_share_of_each_pool_and_leaves_shared_pages_to_another(
    make: Make, hashes: Hashes, backend: RecordingBackend
) -> None:
    target, draft = MlaHostPool(), MhaHostPool(layers=1)
    fill(target)
    fill(draft, seed=2)
    storage = make(target, is_mla_model=True, tp_rank=1, tp_size=2)
    storage.register_draft_host_pool(draft)
    assert storage.batch_set_v1(hashes(1), indices(target, 0)) == [True]
    transfer = PoolTransfer("draft", indices(draft, 0), hashes(1))
    assert storage.batch_set_v2([transfer]) == {"draft": [True]}
    stored = {name.partition("/")[2] for name in backend._pages if "/n:" not in name}
    assert stored == {"d:" + hashes(1)[0]}
