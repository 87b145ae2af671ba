"""A backend's start and end: pools, options, what the log says, base classes; clear and close."""

from __future__ import annotations

import abc
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from adapters.conftest import Make
from adapters.fake_sglang import (
    HiCacheStorage,
    MhaHostPool,
    PoolName,
    PoolTransfer,
    SlotsOnlyPool,
    StorageConfig,
    base,
    fill,
    indices,
    storage_class,
)
from adapters.storage_calls import Hashes, pair, write_pairs
from recording import RecordingBackend

from hicache_storage import ConfigError
from hicache_storage.adapters import sglang_storage
from hicache_storage.adapters.sglang import bind


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
