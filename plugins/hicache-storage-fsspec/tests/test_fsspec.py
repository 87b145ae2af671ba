"""What fsspec makes easy to get wrong: caches, shared instances, globs, forks, event loops."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hicache_storage_fsspec import FsspecBackend, FsspecConfig
from s3_servers import Server, seaweedfs
from s3fs_stores import s3fs_mapping

from hicache_storage import BackendUnavailable, ConfigError, Namespace, Store, open_store

__all__ = ["seaweedfs"]
NAMESPACE = Namespace(
    model="m", pool="opaque", dtype="uint8", page_size=1, page_bytes=4096, layers=1, heads=1,
    head_dim=4096, v_head_dim=0, order="opaque",
)  # fmt: skip
KEYS = [f"{i:064x}" for i in range(40)]
PAGES = [bytes([i + 1]) * 4096 for i in range(40)]


def read(store: Store, keys: list[str]) -> list[int]:
    """The byte that fills each page; -1 for a miss."""
    got = [bytearray(4096) for _ in keys]
    hits = store.batch_get(NAMESPACE, keys, got)
    assert all(len(set(buffer)) == 1 for buffer in got)
    return [buffer[0] if hit else -1 for hit, buffer in zip(hits, got, strict=True)]


def local(path: Path, **options: Any) -> Store:
    return open_store({"backend": "fsspec", "protocol": "file", "path": str(path), **options})


def in_child(work: Any) -> int:
    """The exit status of a forked child that runs `work`; killed after 30 seconds."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    watchdog = threading.Timer(30, os.kill, (child, 9))
    watchdog.start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    watchdog.cancel()
    return status


@pytest.mark.servers
def test_what_another_client_writes_is_seen_at_once(seaweedfs: Server) -> None:
    where = s3fs_mapping(seaweedfs)
    with open_store(where) as ours, open_store(where) as theirs:
        list(ours.scan())
        assert ours.exists(NAMESPACE, KEYS[:1]) == 0
        theirs.batch_set(NAMESPACE, KEYS[:1], PAGES[:1])
        assert ours.exists(NAMESPACE, KEYS[:1]) == 1
        assert read(ours, KEYS[:1]) == [1]
        assert len(list(ours.scan())) == 1
        theirs.batch_set(NAMESPACE, KEYS[:1], PAGES[1:2])
        assert read(ours, KEYS[:1]) == [2]


@pytest.mark.servers
def test_the_users_own_file_systems_keep_their_instances_and_listings(seaweedfs: Server) -> None:
    where = s3fs_mapping(seaweedfs)
    options = dict(where["storage_options"])
    theirs = fsspec.filesystem("s3", **options)
    theirs.ls("pages")
    cached = dict(theirs.dircache)
    with open_store(where) as store:
        store.batch_set(NAMESPACE, KEYS[:1], PAGES[:1])
        assert store._caller.backend._files.get() is not theirs
    assert where["storage_options"] == options
    assert dict(theirs.dircache).keys() == cached.keys()
    assert fsspec.filesystem("s3", **options) is theirs


@pytest.mark.servers
def test_a_forked_child_reads_and_its_parent_goes_on(seaweedfs: Server) -> None:
    with open_store(s3fs_mapping(seaweedfs)) as store:
        store.batch_set(NAMESPACE, KEYS[:4], PAGES[:4])
        assert in_child(lambda: read(store, KEYS[:5]) == [1, 2, 3, 4, -1]) == 0
        assert read(store, KEYS[:2]) == [1, 2]


@pytest.mark.servers
def test_it_works_inside_a_running_event_loop(seaweedfs: Server) -> None:
    with open_store(s3fs_mapping(seaweedfs)) as store:
        store.batch_set(NAMESPACE, KEYS[:2], PAGES[:2])

        async def inside() -> list[int]:
            return read(store, KEYS[:3])

        assert asyncio.run(asyncio.wait_for(inside(), 30)) == [1, 2, -1]


@pytest.mark.servers
def test_one_instance_serves_all_threads(
    seaweedfs: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs: pip install -e '.[test,s3]'")

    made = []
    original = s3fs.S3FileSystem.__init__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        made.append(self)
        original(self, *arguments, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "__init__", counted)
    with open_store(s3fs_mapping(seaweedfs)) as store:
        store.batch_set(NAMESPACE, KEYS, PAGES)
        results: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: results.append(read(store, KEYS[:8])))
            for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert results == [list(range(1, 9))] * 16
    assert len(made) == 1


@pytest.mark.parametrize("name", ["a[b]c", "st*r", "wh?t", "sp ace", "{x,y}"])
@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_glob_characters_in_the_path_are_just_a_name(
    tmp_path: Path, protocol: str, name: str
) -> None:
    path = f"{tmp_path}/{name}" if protocol == "file" else f"/{uuid.uuid4().hex}/{name}"
    where = {"backend": "fsspec", "protocol": protocol, "path": path}
    with open_store(where) as store:
        store.batch_set(NAMESPACE, KEYS[:2], PAGES[:2])
        assert read(store, KEYS[:3]) == [1, 2, -1]
        assert len(list(store.scan())) == 2
        store.clear()
        assert store.exists(NAMESPACE, KEYS[:1]) == 0


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_missing_and_unreadable_pages_spoil_no_neighbour(
    tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "pages") if protocol == "file" else f"/{uuid.uuid4().hex}"
    with open_store({"backend": "fsspec", "protocol": protocol, "path": path}) as store:
        keys = KEYS[:5]
        store.batch_set(NAMESPACE, keys, PAGES[:5])
        store.delete(NAMESPACE, keys[2:3])
        cls = LocalFileSystem if protocol == "file" else MemoryFileSystem
        original = cls.cat_file

        def cat_file(self: Any, path: str, *arguments: Any, **options: Any) -> bytes:
            if path.endswith(keys[3]):
                raise PermissionError(13, "not yours", path)
            return original(self, path, *arguments, **options)

        monkeypatch.setattr(cls, "cat_file", cat_file)
        assert read(store, keys) == [1, 2, -1, -1, 5]
        assert len(list(store.scan())) == 4, "an unreadable page is not deleted"


def test_a_file_system_that_fails_as_a_whole_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local(tmp_path / "pages") as store:

        def away(*_: Any, **__: Any) -> Any:
            raise OSError(112, "host is down")

        monkeypatch.setattr(LocalFileSystem, "info", away)
        with pytest.raises(BackendUnavailable, match="host is down"):
            store.exists(NAMESPACE, KEYS[:3])


def test_a_writer_killed_before_the_move_leaves_no_page_and_its_rest_is_swept(
    tmp_path: Path,
) -> None:
    with local(tmp_path / "pages") as store:
        store.batch_set(NAMESPACE, KEYS[:1], PAGES[:1])

        def killed_before_the_move() -> bool:
            os.replace = lambda *_: os._exit(0)  # type: ignore[assignment]
            store.batch_set(NAMESPACE, KEYS[:1], PAGES[1:2])
            return False

        assert in_child(killed_before_the_move) == 0
        assert read(store, KEYS[:1]) == [1]
        assert store.usage().pages == 2, "the page and the namespace's record"
        (rest,) = tmp_path.rglob(".writing-*")
    local(tmp_path / "pages").close()
    assert rest.exists(), "it may be a live writer's"
    os.utime(rest, (1, 1))
    local(tmp_path / "pages").close()
    assert not rest.exists()


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    import shutil

    with local(tmp_path / "pages") as store:
        store.batch_set(NAMESPACE, KEYS[:1], PAGES[:1])
        shutil.rmtree(tmp_path / "pages")
        assert store.batch_set(NAMESPACE, KEYS[:1], PAGES[:1]) == [True]
        assert read(store, KEYS[:1]) == [1]


def test_foreign_files_are_neither_scanned_nor_cleared(tmp_path: Path) -> None:
    with local(tmp_path / "pages") as store:
        store.batch_set(NAMESPACE, KEYS[:1], PAGES[:1])
        beside = next(p for p in (tmp_path / "pages").rglob("*") if p.is_file()).parent
        foreign = [beside / "readme.txt", tmp_path / "pages" / "notes", beside / ("f" * 64)]
        for path in foreign:
            path.write_text("theirs")
        assert [page.key for page in store.scan()] == [f"{NAMESPACE.digest}/{KEYS[0]}"]
        store.clear()
        assert all(path.exists() for path in foreign)


def test_a_url_takes_options_as_json(tmp_path: Path) -> None:
    options = json.dumps({"auto_mkdir": False})
    with open_store(f"fsspec://file{tmp_path}/kv", storage_options=options) as store:
        assert store._caller.backend._files.get().auto_mkdir is False


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"protocol": "nonesuch", "path": "x"}, "nonesuch"),
        ({"protocol": "file", "path": "/"}, "directory or bucket/prefix of its own"),
        ({"protocol": "memory", "path": "x", "storage_options": "{"}, "not JSON"),
        ({"protocol": "memory", "path": "x", "storage_options": [1]}, "must be a mapping"),
        ({"protocol": "memory", "path": "x", "publish": "maybe"}, "expected one of auto, put"),
        ({"protocol": "memory", "path": "x", "storage_option": {}}, "did you mean"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_store({"backend": "fsspec", **given})


def test_secrets_are_in_no_text() -> None:
    config = FsspecConfig("s3", "b/p", {"secret": "s3cr3t-word"})
    assert "s3cr3t-word" not in repr(config) + repr(FsspecBackend(config))


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_a_local_path_is_absolute_whatever_directory_is_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with open_store(f"fsspec://{protocol}{tmp_path}/pages") as store:
        assert store.batch_set(NAMESPACE, KEYS[:1], PAGES[:1]) == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "pages"]
    assert list(elsewhere.iterdir()) == []
    with local(tmp_path / "pages") as store:
        assert read(store, KEYS[:1]) == [1]
