"""Where pages lie, and that nothing outside of a store's own directory is ever touched."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from backends.file_rig import (
    DIGEST,
    found,
    key,
    opened,
    page,
    page_files,
    path_of,
    store,
)

from hicache_storage import (
    BackendUnavailable,
    ConfigError,
    InvalidKey,
    open_store,
)
from hicache_storage.backends.file import FileConfig
from hicache_storage.backends.file import root as root_module
from hicache_storage.backends.file.names import page_place, stored_key_at

HASH = "ab" * 32
BAD_KEYS = [
    "",
    "..",
    "../x",
    "/etc/x",
    "a/../../x",
    "d:../x",
    f"d:{HASH}/..",
    f"{HASH}\x00",
    "CON",
    HASH.upper(),
    f"{HASH}.tmp",
    f"d:d:{HASH}",
    "n" * 500,
]


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_a_key_outside_the_allowed_form_becomes_no_path(tmp_path: Path, bad: str) -> None:
    backend = opened(tmp_path / "root")
    for name in (bad, f"{DIGEST}/{bad}", f"../{DIGEST}/{HASH}", f"{DIGEST}/../{HASH}"):
        with pytest.raises(InvalidKey):
            backend.batch_set([name], [page(1)])
        with pytest.raises(InvalidKey):
            backend.batch_get([name], [page(1)])
        with pytest.raises(InvalidKey):
            backend.exists([name])
        with pytest.raises(InvalidKey):
            backend.delete([name])
    assert page_files(tmp_path) == []


@pytest.mark.parametrize(
    "stored",
    [f"{DIGEST}/{HASH}", f"{DIGEST}/d:{HASH}", f"{DIGEST}/n:{DIGEST}", f"{DIGEST}/" + "0" * 16],
)
def test_a_place_names_its_key_and_no_other(stored: str) -> None:
    place, name = page_place(stored)
    namespace, shard = place.split("/")
    assert stored_key_at(namespace, shard, name) == stored
    assert stored_key_at(namespace, "zz", name) is None
    assert ":" not in name  # some file systems refuse it


def test_what_a_link_inside_the_root_points_to_is_neither_read_written_nor_removed(
    tmp_path: Path,
) -> None:
    backend, outside = opened(tmp_path / "root"), tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    assert store(backend, [1]) == [True]
    shard = path_of(tmp_path / "root", 1).parent
    namespace = shard.parent
    treasure = outside / path_of(tmp_path / "root", 1).name
    treasure.write_bytes(b"".join(page(1)))
    for place in (shard, namespace):
        moved = place.rename(tmp_path / "moved")
        place.symlink_to(outside if place == shard else tmp_path / "farther")
        (tmp_path / "farther").mkdir(exist_ok=True)
        fresh = opened(tmp_path / "root")
        assert found(fresh, [1]) == [False]
        assert fresh.exists([key(1)]) == 0
        assert store(fresh, [1]) == [False]
        assert list(fresh.scan("")) == []
        fresh.clear()
        fresh.close()
        place.unlink()
        moved.rename(place)
    assert sorted(path.name for path in outside.iterdir()) == sorted(["kept", treasure.name])
    assert list((tmp_path / "farther").iterdir()) == []


def test_a_page_file_that_is_a_link_is_a_miss_and_is_replaced_not_followed(tmp_path: Path) -> None:
    backend, outside = opened(tmp_path / "root"), tmp_path / "outside"
    outside.write_bytes(b"".join(page(1)))
    path_of(tmp_path / "root", 1).parent.mkdir(parents=True)
    path_of(tmp_path / "root", 1).symlink_to(outside)
    assert found(backend, [1]) == [False]
    assert backend.exists([key(1)]) == 0
    assert store(backend, [1], version=1) == [True]
    assert found(backend, [1], versions=[1]) == [True]
    assert outside.read_bytes() == b"".join(page(1))


def test_neither_a_pipe_nor_a_directory_in_a_page_s_place_stops_the_others(tmp_path: Path) -> None:
    backend = opened(tmp_path / "root")
    assert store(backend, range(3)) == [True] * 3
    for number, make in ((0, os.mkfifo), (1, os.mkdir)):
        path_of(tmp_path / "root", number).unlink()
        make(path_of(tmp_path / "root", number))
    assert found(backend, range(3)) == [False, False, True]
    assert backend.exists([key(0)]) == backend.exists([key(1)]) == 0
    assert store(backend, range(3)) == [True, False, True]


@pytest.mark.parametrize(
    "foreign", ["notes.txt", "0" * 31, ".hidden", "ab", f"{DIGEST}x", "lost+found2"]
)
def test_a_directory_that_holds_something_else_is_refused_and_left_alone(
    tmp_path: Path, foreign: str
) -> None:
    (tmp_path / foreign).write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty .* not a store"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [foreign]
    assert (tmp_path / foreign).read_text() == "mine"


def test_an_empty_directory_and_the_root_of_a_disk_become_stores(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert store(opened(tmp_path), [1]) == [True]


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / ".hicache-storage/format").write_text("hicache-storage file store, format 2\n")
    with pytest.raises(ConfigError, match="another format"):
        opened(tmp_path)


def test_clearing_and_evicting_remove_no_foreign_file(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=4000, recency_s=0.0)
    assert store(backend, range(3)) == [True] * 3
    shard = path_of(tmp_path, 1).parent
    foreign = [
        tmp_path / "README",
        tmp_path / "not-a-namespace" / "ab" / HASH,
        shard.parent / "zz" / HASH,
        shard.parent / "notes",
        shard / "notes",
        shard / f"{HASH}.bak",
        shard / "d-",
        shard / ("00" if shard.name != "00" else "11").ljust(64, "0"),  # a page in another's place
        tmp_path / DIGEST.upper() / "ab" / HASH,
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 4000)
        os.utime(path, (0, 0))
    assert [one.key for one in backend.scan("")] == [
        one.key for one in backend.scan("") if one.key in map(key, range(3))
    ]
    assert store(backend, range(3, 30)) == [True] * 27
    assert 0 < sum(found(backend, range(30))) < 10
    backend.clear()
    assert found(backend, range(30)) == [False] * 30
    assert [path for path in foreign if path.read_bytes() != b"x" * 4000] == []
    assert sorted(page_files(tmp_path)) == sorted(foreign)


def test_names_that_the_file_system_can_not_hold_are_found_out_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pathconf", lambda path, name: 90)
    with pytest.raises(ConfigError, match="at most 90 bytes; pages need 97"):
        opened(tmp_path / "short")
    monkeypatch.setattr(os, "pathconf", lambda path, name: 143)  # as eCryptfs has it
    assert store(opened(tmp_path / "encrypted"), [1]) == [True]


def test_a_root_whose_path_is_too_long_is_refused_at_opening(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        opened(tmp_path / ("x" * 300))
    deep = tmp_path
    for _ in range(20):
        deep /= "y" * 199
    with pytest.raises(ConfigError, match="Give one of at most"):
        opened(deep)


def test_a_name_too_long_for_the_disk_is_one_refused_page_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(tmp_path)
    place = page_place

    def long(stored: str) -> tuple[str, str]:
        directory, name = place(stored)
        return directory, name.ljust(256, "0") if stored != key(1) else name

    for module in ("reading", "writing", "removing"):
        monkeypatch.setattr(f"hicache_storage.backends.file.{module}.page_place", long)
    with caplog.at_level(logging.WARNING):
        assert store(backend, range(3)) == [False, True, False]
        assert found(backend, range(3)) == [False, True, False]
        assert backend.exists([key(1), key(2)]) == 1
    assert len([line for line in caplog.messages if "write, ENAMETOOLONG" in line]) == 1


def test_model_names_tenants_and_keys_leave_no_trace_in_paths(tmp_path: Path) -> None:
    from hicache_storage import Namespace

    shape = {
        "pool": "opaque",
        "dtype": "uint8",
        "page_size": 1,
        "page_bytes": 8,
        "layers": 1,
        "heads": 1,
        "head_dim": 8,
        "v_head_dim": 0,
        "order": "opaque",
    }
    names = ["org/model", "org-model", "../m", "a\\b", "/etc/passwd", "m" * 300, "nul\x00", "ü"]
    spaces = [Namespace(model=name, tenant=name[::-1], **shape) for name in names]
    with open_store(f"file://{tmp_path}/root", min_free=0) as opened_store:
        for number, space in enumerate(spaces):
            assert opened_store.batch_set(space, [HASH], [bytes([number] * 8)]) == [True]
        for number, space in enumerate(spaces):
            buffer = bytearray(8)
            assert opened_store.batch_get(space, [HASH], [buffer]) == [True]
            assert buffer == bytes([number] * 8)
        assert {space.model for space in opened_store.namespaces().values() if space} == set(names)
    allowed = set("0123456789abcdef-n")
    for path in page_files(tmp_path / "root"):
        assert set(str(path.relative_to(tmp_path / "root")).replace("/", "")) <= allowed
        assert len(path.name) <= 100


def test_a_missing_root_is_made_unless_the_store_is_only_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a store"):
        opened(tmp_path / "a" / "b", read_only=True)
    assert list(tmp_path.iterdir()) == []
    assert store(opened(tmp_path / "a" / "b"), [1]) == [True]


def test_a_root_that_is_gone_is_an_error_and_not_made_again(tmp_path: Path) -> None:
    backend = opened(tmp_path / "root")
    assert store(backend, [1]) == [True]
    (tmp_path / "root").rename(tmp_path / "away")
    (tmp_path / "root").mkdir()  # as the mount point of a disk that went away
    for call in (
        lambda: store(backend, [1]),
        lambda: store(backend, [2]),
        lambda: found(backend, [1]),
        lambda: backend.exists([key(1)]),
        lambda: backend.delete([key(1)]),
        lambda: list(backend.scan("")),
        backend.usage,
        backend.clear,
    ):
        with pytest.raises(BackendUnavailable, match="gone or can't be read") as caught:
            call()
        assert caught.value.retryable
    assert list((tmp_path / "root").iterdir()) == []
    (tmp_path / "root").rmdir()
    (tmp_path / "away").rename(tmp_path / "root")
    assert found(backend, [1]) == [True]
    assert store(backend, [2]) == [True]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"path": ""}, "needs a path"),
        ({"capacity": 0}, "capacity"),
        ({"low_watermark": 0.0}, "low_watermark"),
        ({"low_watermark": 1.1}, "low_watermark"),
        ({"min_free": -1}, "min_free"),
        ({"io_threads": 0}, "io_threads"),
        ({"io_threads": 33}, "io_threads"),
        ({"recency_s": -1.0}, "recency_s"),
        ({"resync_s": 0.0}, "resync_s"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FileConfig(**{"path": "/x", **wrong})


def test_making_the_marker_is_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies between making the directories and the marker leaves a root that the
    next one takes over."""

    class Died(BaseException):
        pass

    def die(*_: object) -> None:
        raise Died

    monkeypatch.setattr(root_module.os, "replace", die)
    with pytest.raises(Died):
        opened(tmp_path / "root")
    monkeypatch.undo()
    assert store(opened(tmp_path / "root"), [1]) == [True]
