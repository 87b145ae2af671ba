"""What is on the disk when: fsync before True, syncfs in flush; and what a network disk changes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from backends.file_rig import (
    DIGEST,
    found,
    key,
    opened,
    page_files,
    path_of,
    store,
    stored_bytes,
    temp_files,
)

from hicache_storage import BackendUnavailable, ConfigError, open_store
from hicache_storage.backends import mounts
from hicache_storage.backends.file import backend as backend_module
from hicache_storage.backends.file import durability, root, transfer

PAGE = 64 + 512


class Order:
    """What is synced and published, in order, as ("sync" or "publish", path)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, str]] = []
        self.unsynced: list[str] = []
        """Pages that were published before their file was synced."""
        self.fails: dict[str, int] = {}
        """By the end of a path: errno of its sync."""
        fsync, put = os.fsync, transfer.put_in_place

        def syncing(fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            for end, number in self.fails.items():
                if path.endswith(end):
                    raise OSError(number, os.strerror(number))
            fsync(fd)
            self.steps.append(("sync", path))

        def publishing(temp: str, path: str) -> int:
            if ("sync", temp) not in self.steps:
                self.unsynced.append(path)
            replaced = put(temp, path)
            self.steps.append(("publish", path))
            return replaced

        monkeypatch.setattr(os, "fsync", syncing)
        monkeypatch.setattr(transfer, "put_in_place", publishing)

    def of(self, what: str) -> list[str]:
        return [path for kind, path in self.steps if kind == what]


def test_with_fsync_a_page_is_synced_then_published_then_its_directory_synced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, durability="fsync")
    order = Order(monkeypatch)
    assert store(backend, range(40)) == [True] * 40
    published = order.of("publish")
    assert order.unsynced == []
    assert sorted(published) == sorted(str(path_of(tmp_path, number)) for number in range(40))
    shards = {str(path_of(tmp_path, number).parent) for number in range(40)}
    last_publish = max(i for i, (what, _) in enumerate(order.steps) if what == "publish")
    behind = [path for _, path in order.steps[last_publish + 1 :]]
    assert sorted(behind) == sorted(shards)
    # New directories survive too: what holds them was synced before anything lay in them.
    first_publish = order.steps.index(("publish", published[0]))
    before = [path for _, path in order.steps[:first_publish]]
    assert str(tmp_path) in before
    assert str(tmp_path / DIGEST) in before
    order.steps.clear()
    assert store(backend, range(40, 44)) == [True] * 4
    assert set(order.of("sync")) >= {
        str(path_of(tmp_path, number).parent) for number in range(40, 44)
    }


def test_without_it_nothing_is_synced_before_flush_and_flush_syncs_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    order, flushed = Order(monkeypatch), []
    monkeypatch.setattr(backend_module, "sync_file_system", flushed.append)
    assert store(backend, range(20)) == [True] * 20
    assert order.of("sync") == []
    backend.flush()
    assert flushed == [str(tmp_path)]
    synced = opened(tmp_path, durability="fsync")
    synced.flush()
    assert flushed == [str(tmp_path)]  # what was acknowledged was synced already


def test_with_fsync_a_page_that_somebody_else_wrote_is_synced_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store(opened(tmp_path), [1]) == [True]
    backend = opened(tmp_path, durability="fsync")
    order = Order(monkeypatch)
    assert store(backend, [1]) == [True]
    assert order.of("publish") == []
    for path in (path_of(tmp_path, 1), path_of(tmp_path, 1).parent, tmp_path / DIGEST, tmp_path):
        assert str(path) in order.of("sync")


def test_a_page_that_can_not_be_synced_is_false_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, durability="fsync")
    order = Order(monkeypatch)
    order.fails = {".tmp": errno.EIO}
    assert store(backend, range(3)) == [False] * 3
    assert page_files(tmp_path) == []
    order.fails = {}
    assert store(backend, range(3)) == [True] * 3


def test_a_directory_that_can_not_be_synced_makes_only_its_own_pages_false(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, durability="fsync")
    order = Order(monkeypatch)
    order.fails = {f"{DIGEST}/{path_of(tmp_path, 1).parent.name}": errno.EIO}
    assert store(backend, range(3)) == [True, False, True]
    order.fails = {}
    assert store(backend, range(3)) == [True] * 3
    assert temp_files(tmp_path) == []


def test_flush_says_so_if_the_disk_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(tmp_path)
    durability.sync_file_system(str(tmp_path))
    backend.flush()

    class C:
        @staticmethod
        def syncfs(fd: int) -> int:
            durability.ctypes.set_errno(errno.EIO)
            return -1

    monkeypatch.setattr(durability.ctypes, "CDLL", lambda *_, **__: C)
    with pytest.raises(BackendUnavailable, match="Input/output error"):
        backend.flush()
    synced = []
    monkeypatch.setattr(durability.ctypes, "CDLL", lambda *_, **__: object())
    monkeypatch.setattr(os, "sync", lambda: synced.append(True))
    backend.flush()
    assert synced == [True]


def test_an_unknown_durability_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"durability.*none, fsync"):
        open_store(f"file://{tmp_path}/root?durability=maybe")
    assert list(tmp_path.iterdir()) == []


# -- file systems --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "evicts", "warns"),
    [
        ("ext4", True, False),
        ("xfs", True, False),
        ("tmpfs", True, False),
        ("overlay", True, False),
        ("", True, False),
        ("nfs4", False, True),
        ("cifs", False, True),
        ("lustre", False, True),
        ("fuse.sshfs", False, True),
        ("9p", True, True),
        ("fuse", True, True),
    ],
)
def test_on_a_network_file_system_nothing_is_evicted_and_that_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    evicts: bool,
    warns: bool,
) -> None:
    monkeypatch.setattr(root, "file_system", lambda path: kind)
    with caplog.at_level(logging.WARNING):
        backend = opened(tmp_path, capacity=10 * PAGE)
        assert store(backend, range(30)) == [True] * 30
    assert (stored_bytes(tmp_path) <= 10 * PAGE) is evicts
    assert found(backend, [29]) == [True]
    assert backend.usage().capacity_bytes == (10 * PAGE if evicts else None)
    assert bool([line for line in caplog.messages if f"is on {kind}" in line]) is warns
    assert len(caplog.messages) <= 1
    assert backend.delete([key(29)]) == [True]
    backend.clear()
    assert page_files(tmp_path) == []
    backend.close()


def test_on_a_network_file_system_of_one_writer_eviction_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(root, "file_system", lambda path: "nfs4")
    with caplog.at_level(logging.WARNING):
        backend = opened(tmp_path, capacity=10 * PAGE, network_eviction=True)
        assert store(backend, range(30)) == [True] * 30
    assert stored_bytes(tmp_path) <= 10 * PAGE
    assert caplog.messages == []
    backend.close()


def test_where_locks_do_not_work_a_temporary_file_is_kept_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perhaps it is still being written, on another host."""
    first = opened(tmp_path)
    assert store(first, [1]) == [True]
    first.close()
    writers, shard = tmp_path / ".hicache-storage/writers", path_of(tmp_path, 1).parent
    young, old = shard / f".{'d' * 16}-3.tmp", shard / f".{'e' * 16}-3.tmp"
    now_s = time.time()
    for path, age_s in ((young, 20 * 3600), (old, 30 * 3600)):
        writer = writers / path.name[1:17]
        for one in (path, writer):
            one.write_bytes(b"")
        os.utime(writer, (0, now_s - 40 * 3600))
        os.utime(path, (0, now_s - age_s))

    def no_locks(fd: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(root, "file_system", lambda path: "nfs")
    backend = opened(tmp_path, temp_age_s=60.0)
    assert store(backend, [2]) == [True]
    backend.close()
    assert temp_files(tmp_path) == [young]
    assert len(list(writers.iterdir())) == 2
    monkeypatch.undo()
    opened(tmp_path, temp_age_s=60.0).close()
    assert temp_files(tmp_path) == []
    assert list(writers.iterdir()) == []


def test_the_file_system_is_found_by_the_longest_mount_point(tmp_path: Path) -> None:
    kind = mounts.file_system(str(tmp_path))
    assert kind
    assert mounts.file_system("/proc") == "proc"
