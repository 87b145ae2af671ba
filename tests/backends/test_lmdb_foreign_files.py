"""Files of other programs, formats and layouts are refused and left; so are releases of the client
that break their promises."""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import pytest
from backends.lmdb_rig import Child, aside, data_file, extent, filled, found, opened

from hicache_storage import ConfigError
from hicache_storage.backends.lmdb import opening


def test_an_environment_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=2) as handle, handle.begin(write=True) as txn:
        txn.put(b"their key", b"their value")
    before = data_file(tmp_path).read_bytes()
    with pytest.raises(ConfigError, match="their key"):
        opened(tmp_path)
    assert data_file(tmp_path).read_bytes() == before
    assert not aside(tmp_path)


def test_a_file_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    filled(tmp_path)
    raw = bytearray(data_file(tmp_path).read_bytes())
    for meta in (0, 4096):
        struct.pack_into("=I", raw, meta + 20, 3)
    data_file(tmp_path).write_bytes(raw)
    with pytest.raises(ConfigError, match="format 3"):
        opened(tmp_path)
    shifted = bytes(8) + bytes(raw[:-8])
    data_file(tmp_path).write_bytes(shifted)
    with pytest.raises(ConfigError, match="format"):
        opened(tmp_path)
    assert data_file(tmp_path).read_bytes() == shifted
    assert not aside(tmp_path)


def test_a_newer_layout_of_this_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    filled(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=4) as handle:
        totals = handle.open_db(b"totals")
        with handle.begin(write=True) as txn:
            txn.put(b"format", b"hicache-storage lmdb 2", db=totals)
    with pytest.raises(ConfigError, match="lmdb 2"):
        opened(tmp_path)
    assert not aside(tmp_path)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(ConfigError, match="not a directory"):
        opened(tmp_path / "file")


def test_a_new_file_has_the_format_that_every_release_reads(tmp_path: Path) -> None:
    """Also where the client was told to make new files in the format of LMDB 1.0."""
    child = Child(
        "backend = opened(sys.argv[1]); store(backend, [1]); backend.close()",
        tmp_path,
        variables={"LMDB_DEFAULT_LIB_VERSION": "1"},
    )
    with child:
        child.end()
    assert extent(tmp_path).entries["pages"] == 1
    backend = opened(tmp_path)
    assert found(backend, [1]) == [True]
    backend.close()


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("1.4.1", False),
        ("1.6.2", False),
        ("1.7.3", True),
        ("1.8.1", True),
        ("2.0.0", False),
        ("2.1.1", True),
        ("2.2.1", False),
        ("2.3.0", True),
        ("3.0.0", True),
        ("10.0.0rc1", True),
    ],
)
def test_releases_of_the_client_that_break_their_promises_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, good: bool
) -> None:
    monkeypatch.setattr(lmdb, "__version__", version)
    if good:
        opening.check_release(version)
    else:
        with pytest.raises(ConfigError, match=f"lmdb {version}"):
            opened(tmp_path / "pages")
        assert not (tmp_path / "pages").exists()
