"""SGLang's storage backend: one object a page whatever the call, and a full answer always."""

from __future__ import annotations

import abc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.conftest import Make
from adapters.fake_sglang import (
    LAYOUTS,
    HiCacheStorage,
    MhaHostPool,
    MlaHostPool,
    OldPoolTransferResult,
    PoolName,
    PoolTransfer,
    SlotsOnlyPool,
    StorageConfig,
    base,
    fill,
    indices,
    page_bytes,
    storage_class,
)
from recording import RecordingBackend

from hicache_storage import BackendTimeout, ConfigError
from hicache_storage.adapters import sglang_storage
from hicache_storage.adapters.sglang import bind

Hashes = Callable[[int], list[str]]
WAYS = ("flat", "in place", "by pool")


def write(storage: Any, way: str, keys: list[str], pool: Any, pages: list[int]) -> list[bool]:
    where = indices(pool, *pages)
    if way == "flat":
        flat = [pool.get_data_page(page * pool.page_size) for page in pages]
        return [storage.batch_set(keys, flat)] * len(keys)
    if way == "in place":
        return list(storage.batch_set_v1(keys, where, None))
    return list(storage.batch_set_v2([PoolTransfer(PoolName.KV, where, keys)])[PoolName.KV])


def read(storage: Any, way: str, keys: list[str], pool: Any, pages: list[int]) -> list[bool]:
    """Reads as SGLang does: flat pages are put into the pool by the caller."""
    where = indices(pool, *pages)
    if way == "flat":
        flat = storage.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for page, tensor in zip(pages, flat, strict=True):
            if tensor is not None:
                pool.set_from_flat_data_page(page * pool.page_size, tensor)
        return [tensor is not None for tensor in flat]
    if way == "in place":
        return list(storage.batch_get_v1(keys, where, None))
    return list(storage.batch_get_v2([PoolTransfer("kv", where, keys)], extra_info=None)["kv"])


@pytest.mark.parametrize("kind", [MhaHostPool, MlaHostPool])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("written", WAYS)
def test_a_page_written_by_any_call_is_read_by_every_call(
    make: Make, hashes: Hashes, kind: Any, layout: str, written: str
) -> None:
    source = kind(layout)
    fill(source)
    assert write(make(source), written, hashes(3), source, [2, 0, 5]) == [True] * 3
    for way in WAYS:
        target = kind(layout)
        storage = make(target)
        assert storage.batch_exists(hashes(4), None) == 3
        assert read(storage, way, hashes(3), target, [1, 7, 3]) == [True] * 3
        for page, original in ((1, 2), (7, 0), (3, 5)):
            assert page_bytes(target, page) == page_bytes(source, original)
        untouched = [page_bytes(target, page) for page in (0, 2, 4, 5, 6)]
        assert not any(map(any, untouched))


def test_a_page_is_stored_once_whatever_the_call(
    make: Make, hashes: Hashes, backend: RecordingBackend
) -> None:
    pool = MhaHostPool()
    fill(pool)
    for way in WAYS:
        write(make(pool), way, hashes(1), pool, [0])
    names = [name for name in backend._pages if "/n:" not in name]
    assert len(names) == 1


@pytest.mark.parametrize("form", ["d:{}", "{}.draft", "pool"])
def test_every_form_of_a_drafts_key_is_one_object(
    make: Make, hashes: Hashes, backend: RecordingBackend, form: str
) -> None:
    pool, draft = MhaHostPool(), MhaHostPool(layers=1)
    fill(draft)
    storage = make(pool)
    storage.register_mem_host_pool_v2(draft, "draft")
    flat = [draft.get_data_page(0)]
    if form == "pool":
        results = storage.batch_set_v2([PoolTransfer(PoolName.DRAFT, indices(draft, 0), hashes(1))])
        assert results == {PoolName.DRAFT: [True]}
    else:
        assert storage.batch_set([form.format(hashes(1)[0])], flat)
    assert [name.partition("/")[2] for name in backend._pages if "/n:" not in name] == [
        "d:" + hashes(1)[0]
    ]
    for other in ("d:{}", "{}.draft"):
        (found,) = storage.batch_get(
            [other.format(hashes(1)[0])], [draft.get_dummy_flat_data_page()]
        )
        assert torch.equal(found.view(torch.uint8), flat[0].view(torch.uint8))
        assert storage.exists(other.format(hashes(1)[0]))
    twin = MhaHostPool(layers=1)
    again = make(pool)
    again.register_mem_host_pool_v2(twin, PoolName.DRAFT)
    assert again.batch_get_v2([PoolTransfer("draft", indices(twin, 4), hashes(1))]) == {
        "draft": [True]
    }
    assert page_bytes(twin, 4) == page_bytes(draft, 0)
    assert not storage.exists(hashes(1)[0])


def test_a_key_of_no_known_form_is_never_stored_and_costs_its_neighbours_nothing(
    make: Make, hashes: Hashes, backend: RecordingBackend, caplog: pytest.LogCaptureFixture
) -> None:
    pool = MhaHostPool()
    fill(pool)
    storage = make(pool)
    good, bad = hashes(1)[0], hashes(1)[0] + ".mamba"
    flat = [pool.get_data_page(0), pool.get_data_page(4)]
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert storage.batch_set([bad, good], flat) is False
    assert caplog.text.count("has none of the forms") == 1
    assert storage.batch_get([bad, good], [torch.zeros_like(page) for page in flat])[0] is None
    assert storage.batch_exists([good, bad], None) == 1
    assert storage.batch_exists([bad, good], None) == 0
    assert storage.batch_set_v1([bad], indices(pool, 0)) == [False]
    assert storage.batch_get_v1([f"d:{good}"], indices(pool, 0)) == [False]
    assert {name.partition("/")[2] for name in backend._pages if "/n:" not in name} == {good}


@pytest.mark.parametrize("key", ["path", "json", "none"])
def test_extra_info_of_every_release_gives_the_prefix_or_none(
    make: Make, hashes: Hashes, backend: RecordingBackend, key: str
) -> None:
    prefix = {"path": hashes(5)[3:], "json": (None,), "none": None}[key]
    pool = MhaHostPool()
    storage = make(pool)
    extra = SimpleNamespace(prefix_keys=prefix)
    storage.batch_exists(hashes(2), extra)
    storage.batch_set_v1(hashes(2), indices(pool, 0, 1), extra)
    storage.batch_get_v1(hashes(2), indices(pool, 0, 1), extra)
    digest = storage.server.target.namespace.digest
    wanted = [f"{digest}/{h}" for h in hashes(5)[3:]] if key == "path" else None
    assert [call[2] for call in backend.calls] == [wanted] * 3


# Drafts


def pair(make: Make, options: dict[str, Any] | None = None, **config: Any) -> tuple[Any, ...]:
    pool, draft = MhaHostPool(), MhaHostPool(layers=1)
    fill(pool)
    fill(draft, seed=1)
    storage = make(pool, options, **config)
    storage.register_draft_host_pool(draft)
    return storage, pool, draft


def write_pairs(storage: Any, pool: Any, draft: Any, keys: list[str]) -> None:
    pages = list(range(len(keys)))
    assert storage.batch_set_v1(keys, indices(pool, *pages)) == [True] * len(keys)
    flat = [draft.get_data_page(page * draft.page_size) for page in pages]
    assert storage.batch_set([f"d:{key}" for key in keys], flat)


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


# Pools


def test_pools_come_late_twice_and_under_any_form_of_their_name(make: Make, hashes: Hashes) -> None:
    pool, draft = MhaHostPool(), MhaHostPool(layers=1)
    fill(draft)
    storage = make()
    transfer = PoolTransfer(PoolName.DRAFT, indices(draft, 0), hashes(1))
    assert storage.batch_set_v1(hashes(1), indices(pool, 0)) == [False]
    storage.register_mem_pool_host(pool)
    assert storage.batch_set_v2([transfer]) == {PoolName.DRAFT: [False]}
    for name in (PoolName.KV, "kv"):
        storage.register_mem_host_pool_v2(pool, name)
    storage.on_host_pools_registered()
    for name in ("draft", PoolName.DRAFT):
        storage.register_mem_host_pool_v2(draft, name)
    assert storage.batch_set_v2([transfer]) == {"draft": [True]}


def test_a_group_of_pools_is_its_anchor(make: Make, hashes: Hashes) -> None:
    pool = MhaHostPool()
    fill(pool)
    group = SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=pool))
    assert make(group).batch_set_v1(hashes(1), indices(pool, 3)) == [True]


def test_a_target_pool_without_memory_of_its_own_is_refused_by_name(make: Make) -> None:
    with pytest.raises(ConfigError, match="SlotsOnlyPool"):
        make(SlotsOnlyPool())


def test_another_pool_that_cant_be_stored_is_said_and_the_server_goes_on(
    make: Make, hashes: Hashes, caplog: pytest.LogCaptureFixture
) -> None:
    pool = MhaHostPool()
    fill(pool)
    storage = make(pool)
    with caplog.at_level(logging.ERROR):
        storage.register_mem_host_pool_v2(SlotsOnlyPool(), "indexer")
    assert "pool indexer is not stored" in caplog.text
    assert storage.batch_set_v1(hashes(1), indices(pool, 0)) == [True]


def test_no_transfers_are_no_results(make: Make) -> None:
    storage = make(MhaHostPool())
    assert storage.batch_get_v2([], extra_info=None) == {}
    assert storage.batch_set_v2([]) == {}
    assert storage.batch_set([], []) is True
    assert storage.batch_get([], []) == []
    assert storage.batch_exists([], None) == 0
    assert storage.batch_exists_v2([], []).kv_hit_pages == 0


# Faults

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


def test_a_first_page_that_is_missing_is_counted(
    make: Make, hashes: Hashes, backend: RecordingBackend
) -> None:
    pool = MhaHostPool()
    fill(pool)
    storage = make(pool)
    write(storage, "in place", hashes(4)[1:], pool, [1, 2, 3])
    assert storage.batch_exists(hashes(4), None) == 0
    counts = storage.server.target.edge.counts
    assert (counts.lookups, counts.lookup_pages, counts.first_page_missing) == (1, 4, 1)


# Opening, clearing, closing


def test_clear_deletes_this_servers_pages_and_no_others(
    make: Make, hashes: Hashes, backend: RecordingBackend
) -> None:
    storage, pool, draft = pair(make)
    other, other_pool, other_draft = pair(make, {"tenant": "other"})
    for who, target, its_draft in ((storage, pool, draft), (other, other_pool, other_draft)):
        write_pairs(who, target, its_draft, hashes(2))
    storage.clear()
    assert storage.batch_exists(hashes(2), None) == 0
    assert other.batch_exists(hashes(2), None) == 2


def test_close_may_come_twice_and_later_calls_find_nothing(make: Make, hashes: Hashes) -> None:
    storage, pool, draft = pair(make)
    write_pairs(storage, pool, draft, hashes(2))
    storage.close()
    storage.close()
    assert storage.batch_exists(hashes(2), None) == 0
    assert storage.batch_set_v1(hashes(2), indices(pool, 0, 1)) == [False, False]
    assert storage.batch_get(hashes(1), [pool.get_dummy_flat_data_page()]) == [None]
    storage.clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bukcet": "b"}, "bukcet"),
        ({"pairing": "x"}, "pairing"),
        ({"url": "nowhere://x"}, "nowhere"),
    ],
)
def test_a_wrong_option_is_said_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(sglang_storage, "open_store", lambda *_: pytest.fail("opened"))
    with pytest.raises(ConfigError, match=message):
        storage_class()(StorageConfig(extra_config=options))


def test_the_log_says_at_the_start_what_is_stored_where(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        storage, _, _ = pair(make, {"tenant": "t"})
    namespace = storage.server.target.namespace
    line = next(r.getMessage() for r in caplog.records if "pool kv" in r.getMessage())
    for part in ("MhaHostPool", "page_first", "4 tokens", "512 bytes", namespace.digest, "'t'"):
        assert part in line
    assert "a lost draft page: required" in caplog.text


def test_weights_known_by_name_alone_are_a_warning_at_the_start(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make(MhaHostPool(), {"revision": ""})
    assert "Set 'revision'" in caplog.text


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


def test_sglangs_metrics_get_what_was_moved_since_the_last_time(
    make: Make, hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "sglang.srt.observability.metrics_collector"
    module = SimpleNamespace(StorageMetrics=StorageMetrics)
    pool = MhaHostPool()
    fill(pool)
    storage = make(pool, enable_storage_metrics=True)
    write(storage, "in place", hashes(3), pool, [0, 1, 2])
    read(storage, "flat", hashes(4), pool, [0, 1, 2, 3])
    assert storage.get_stats() is None
    monkeypatch.setitem(sys.modules, name, module)
    found = storage.get_stats()
    assert (found.backup_pgs, found.prefetch_pgs) == ([3], [3])
    assert all(speed > 0 for speed in (*found.backup_bandwidth, *found.prefetch_bandwidth))
    assert storage.get_stats() == StorageMetrics()
    assert make(pool).get_stats() is None


# Base classes of other releases


def test_new_methods_of_the_base_class_that_are_not_abstract_change_nothing(make: Make) -> None:
    class Grown(HiCacheStorage):
        @abc.abstractmethod
        def clear(self) -> None: ...

        @abc.abstractmethod
        def close(self) -> None: ...

    cls = storage_class(HiCacheStorage=Grown)
    assert make(MhaHostPool(), cls=cls).batch_exists([], None) == 0


def test_an_abstract_method_that_this_release_lacks_is_named_with_what_to_do() -> None:
    class Newer(HiCacheStorage):
        @abc.abstractmethod
        def defragment(self) -> None: ...

    with pytest.raises(ConfigError, match=r"SGLang 9\.9\.9 asks.*defragment.*upgrade"):
        bind(base(HiCacheStorage=Newer), "9.9.9", {})


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
