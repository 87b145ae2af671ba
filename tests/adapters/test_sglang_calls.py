"""One object a page, whatever the call; what was moved or missed is counted."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.conftest import Make
from adapters.fake_sglang import (
    LAYOUTS,
    MhaHostPool,
    MlaHostPool,
    PoolName,
    PoolTransfer,
    fill,
    indices,
    page_bytes,
)
from adapters.storage_calls import WAYS, Hashes, read, write
from recording import RecordingBackend


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


def test_no_transfers_are_no_results(make: Make) -> None:
    storage = make(MhaHostPool())
    assert storage.batch_get_v2([], extra_info=None) == {}
    assert storage.batch_set_v2([]) == {}
    assert storage.batch_set([], []) is True
    assert storage.batch_get([], []) == []
    assert storage.batch_exists([], None) == 0
    assert storage.batch_exists_v2([], []).kv_hit_pages == 0


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
