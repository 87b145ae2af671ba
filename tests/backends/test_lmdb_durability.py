"""Each durability is flags that LMDB acts on, and a batch is one commit of bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backends.lmdb_rig import opened, store

from hicache_storage import ConfigError, open_store
from hicache_storage.backends.lmdb import LmdbConfig

MIB = 1 << 20
NO_META_SYNC, NO_SYNC, WRITE_MAP, MAP_ASYNC = 0x40000, 0x10000, 0x80000, 0x100000


@pytest.mark.parametrize(
    ("durability", "flags"),
    [("sync", 0), ("ordered", NO_META_SYNC), ("async", NO_META_SYNC | NO_SYNC)],
)
def test_each_durability_reaches_lmdb_as_flags_that_act(
    tmp_path: Path, durability: str, flags: int
) -> None:
    backend = opened(tmp_path, durability=durability)
    named: dict[str, bool] = backend.environment.handle.flags()
    found_flags = (
        (0 if named["metasync"] else NO_META_SYNC)
        | (0 if named["sync"] else NO_SYNC)
        | (WRITE_MAP if named["writemap"] else 0)
        | (MAP_ASYNC if named["map_async"] else 0)
    )
    assert found_flags == flags
    backend.close()


@pytest.mark.parametrize("durability", ["sync", "ordered", "async"])
def test_a_batch_of_a_thousand_pages_is_one_commit(tmp_path: Path, durability: str) -> None:
    backend = opened(tmp_path, durability=durability)
    store(backend, [0])
    before = backend.environment.handle.info()["last_txnid"]
    assert store(backend, range(1, 1001), 2048) == [True] * 1000
    assert backend.environment.handle.info()["last_txnid"] - before == 1
    backend.close()


@pytest.mark.parametrize(("durability", "most"), [("ordered", 64 * MIB), ("async", 8 * MIB)])
def test_a_commit_takes_a_bounded_number_of_bytes(
    tmp_path: Path, durability: str, most: int
) -> None:
    backend = opened(tmp_path, durability=durability)
    store(backend, [0])
    before = backend.environment.handle.info()["last_txnid"]
    assert store(backend, range(100), MIB) == [True] * 100
    commits = backend.environment.handle.info()["last_txnid"] - before
    assert commits == -(-100 // (most // (MIB + 64)))
    backend.close()


def test_storing_what_is_stored_already_commits_nothing(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    store(backend, range(20))
    before = backend.environment.handle.info()["last_txnid"]
    for _ in range(3):
        assert store(backend, range(20)) == [True] * 20
    assert backend.environment.handle.info()["last_txnid"] == before
    backend.close()


@pytest.mark.parametrize("name", ["map_async", "writemap", "sync", "metasync", "durable"])
def test_an_option_that_would_not_act_does_not_exist(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no option"):
        open_store(f"lmdb://{tmp_path}", **{name: "true"})


@pytest.mark.parametrize("name", ["none", "map_async", "nosync", "Sync", ""])
def test_a_durability_that_is_not_offered_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected one of"):
        open_store(f"lmdb://{tmp_path}", durability=name)


@pytest.mark.parametrize("durability", ["sync", "ordered", "async"])
def test_integrity_never_rests_on_a_writable_map(durability: Any) -> None:
    flags = LmdbConfig("/x", durability=durability).flags
    assert flags["writemap"] is False
    assert flags["map_async"] is False
    assert LmdbConfig("/x").flags["sync"] is True


def test_the_map_is_opened_without_read_ahead_and_with_many_reader_slots(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    assert backend.environment.handle.flags()["readahead"] is False
    assert backend.environment.handle.max_readers() == 2048
    backend.close()


def test_flush_puts_everything_on_the_disk_whatever_the_durability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for durability in ("sync", "ordered", "async"):
        backend = opened(tmp_path / durability, durability=durability)
        store(backend, range(3))
        synced: list[bool] = []

        class Watched:
            def __init__(self, handle: Any) -> None:
                self._handle = handle

            def sync(self, force: bool = False, log: list[bool] = synced) -> None:
                log.append(force)
                self._handle.sync(force)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._handle, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend.environment, "_handle", Watched(backend.environment.handle))
            backend.flush()
            assert synced == [True]
        backend.close()
