"""A file that may be damaged is walked at the next opening, and kept unless damage is proven."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import lmdb
import pytest
from backends.lmdb_rig import Child, aside, data_file, extent, filled, found, key, opened, store

from hicache_storage import BackendError
from hicache_storage.backends.lmdb import datafile, judging
from hicache_storage.backends.lmdb.datafile import read_meta


def test_damage_that_lmdb_meets_at_work_is_checked_at_the_next_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(tmp_path)
    store(backend, range(10))

    def broken(*_: object, **__: object) -> None:
        raise lmdb.CorruptedError("mdb_get: MDB_CORRUPTED: Located page was wrong type")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hicache_storage.backends.lmdb.backend.read_pages", broken)
        with pytest.raises(BackendError, match="damaged") as caught:
            found(backend, [1])
        assert not caught.value.retryable
    backend.close()
    assert (tmp_path / "suspect").exists()
    with caplog.at_level(logging.ERROR):
        again = opened(tmp_path)
    assert found(again, range(10)) == [True] * 10, "it was not proven: nothing is given up"
    assert not (tmp_path / "suspect").exists()
    assert not caplog.records
    again.close()


def tree_pages(directory: Path) -> list[int]:
    """Numbers of the leaf pages in the file that are in use."""
    raw = data_file(directory).read_bytes()
    with open(data_file(directory), "rb") as file:
        walked = datafile._Walk(file.fileno(), read_meta(file.fileno()), True)
        walked.run()
    return [
        number
        for number in range(2, len(raw) // 4096)
        if walked._taken[number] == 1
        and struct.unpack_from("=QHH", raw, number * 4096)[::2] == (number, 2)
    ]


def long_values(raw: bytes, leaf: int) -> list[int]:
    """Where the entries of a leaf page name the pages of their values, if those are long."""
    (lower,) = struct.unpack_from("=H", raw, leaf + 12)
    places = []
    for offset in range(16, lower, 2):
        node = leaf + struct.unpack_from("=H", raw, leaf + offset)[0]
        flags, key_length = struct.unpack_from("=HH", raw, node + 4)
        if flags == 1:
            places.append(node + 8 + key_length)
    return places


@pytest.mark.parametrize("doubt", ["suspect", "unsynced", "unclosed"])
@pytest.mark.parametrize(
    "damage",
    ["none", "tree page", "start of a body", "number of a body", "one body twice", "free list"],
)
def test_a_doubtful_file_is_walked_and_given_up_only_if_it_is_damaged(
    tmp_path: Path, doubt: str, damage: str
) -> None:
    backend = opened(tmp_path)
    store(backend, range(200), 8192)
    backend.delete([key(number) for number in range(150, 200)])
    backend.close()
    sound = extent(tmp_path)
    assert sound.free_pages > 20
    with open(data_file(tmp_path), "r+b") as file:
        raw = file.read()
        if damage == "tree page":
            file.seek(max(tree_pages(tmp_path)) * 4096 + 8)
            file.write(bytes(200))
        elif damage.endswith("of a body"):
            place = raw.find(struct.pack("=HHI", 0, 4, 2), 8192) - 8
            file.seek(place)
            file.write(bytes(8 if damage.startswith("number") else 16))
        elif damage == "one body twice":
            # Two entries of the tree of bodies that name the same pages.
            leaf = next(n * 4096 for n in tree_pages(tmp_path) if long_values(raw, n * 4096))
            first, second = long_values(raw, leaf)[:2]
            file.seek(second)
            file.write(raw[first : first + 8])
        elif damage == "free list":
            # A free page's number becomes that of a page in use: sooner or later overwritten.
            meta = read_meta(file.fileno())
            leaf = meta.free.root * 4096
            (lower,) = struct.unpack_from("=H", raw, leaf + 12)
            node = struct.unpack_from("=H", raw, leaf + lower - 2)[0]
            ksize = struct.unpack_from("=H", raw, leaf + node + 6)[0]
            file.seek(leaf + node + 8 + ksize + 8)
            file.write(struct.pack("=Q", meta.main.root))
    if doubt == "suspect":
        (tmp_path / "suspect").touch()
    elif doubt == "unsynced":
        (tmp_path / "unsynced").write_text("another start of the machine")
    else:
        (tmp_path / "unclosed").write_text("2")
    backend = opened(tmp_path)
    assert found(backend, range(150), 8192) == [damage == "none"] * 150
    assert len(aside(tmp_path)) == (damage != "none")
    assert store(backend, range(5), 8192) == [True] * 5
    backend.close()
    assert not (tmp_path / "suspect").exists()
    assert not (tmp_path / "unsynced").exists()


def test_a_file_written_without_sync_is_checked_after_the_machine_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[bool] = []
    walk = judging.walk
    monkeypatch.setattr(
        judging,
        "walk",
        lambda fd, **options: walked.append(options["long_pages"]) or walk(fd, **options),
    )
    for durability, checks in (("ordered", 0), ("sync", 0), ("async", 1)):
        directory = tmp_path / durability
        filled(directory, durability=durability)
        filled(directory, durability=durability)
        assert walked == [], "in the same run of the machine there is nothing to doubt"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(judging, "boot_id", lambda: "the next start")
            filled(directory, durability=durability)
            filled(directory, durability="ordered")
        assert walked == [True] * checks
        walked.clear()


def test_a_process_that_keeps_dying_has_the_file_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB ends the process when it meets some kinds of damage."""
    walked: list[int] = []
    walk = judging.walk
    monkeypatch.setattr(
        judging, "walk", lambda fd, **options: walked.append(1) or walk(fd, **options)
    )
    filled(tmp_path)
    die = "backend = opened(sys.argv[1]); os._exit(0)"
    for _ in range(2):
        Child(die, tmp_path).end()
    opened(tmp_path).close()
    assert walked == [1]
    for _ in range(5):
        opened(tmp_path).close()
        Child(die, tmp_path).end()
    assert walked == [1], "an orderly close between them settles it"


def test_a_file_in_use_by_another_process_is_never_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "walk", None)
    filled(tmp_path)
    user = Child(
        """
        backend = opened(sys.argv[1])
        print("open", flush=True)
        sys.stdin.readline()
        assert found(backend, range(200), 8192) == [True] * 200
        backend.close()
        """,
        tmp_path,
    )
    with user:
        assert user.line() == "open"
        for mark in ("suspect", "unclosed"):
            (tmp_path / mark).write_text("9")
        inode = data_file(tmp_path).stat().st_ino
        backend = opened(tmp_path)
        assert found(backend, range(200), 8192) == [True] * 200
        assert data_file(tmp_path).stat().st_ino == inode
        user.tell()
        user.end()
        backend.close()
