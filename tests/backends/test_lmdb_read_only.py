"""A store that is only read: nothing is written, made or replaced, with or without a lock file."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import pytest
from backends.children import own_mounts
from backends.lmdb_rig import Child, aside, data_file, filled, found, key, opened, store

from hicache_storage import BackendError, ConfigError
from hicache_storage.backends.lmdb import opening

MIB = 1 << 20


def test_read_only_reads_and_never_writes(tmp_path: Path) -> None:
    filled(tmp_path, 20)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "lock.mdb"}
    backend = opened(tmp_path, read_only=True, capacity=MIB, recency_s=0)
    assert found(backend, range(25), 8192) == [True] * 20 + [False] * 5
    assert store(backend, [30]) == [False]
    assert backend.delete([key(0), key(99)]) == [False, True]
    assert backend.exists([key(0), key(1), key(99)]) == 2
    assert len(list(backend.scan(""))) == backend.usage().pages == 20
    backend.flush()
    with pytest.raises(BackendError, match="read_only"):
        backend.clear()
    backend.close()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "lock.mdb"} == before


def test_read_only_sees_what_another_process_writes(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    backend = opened(tmp_path, read_only=True, map_size=MIB)
    with Child(
        "b = opened(sys.argv[1]); print(store(b, range(300), 8192).count(True)); b.close()",
        tmp_path,
    ) as child:
        assert child.end() == "300\n"
    assert found(backend, range(300), 8192) == [True] * 300
    backend.close()


@pytest.mark.parametrize("there", ["no directory", "empty directory", "empty environment"])
def test_read_only_makes_no_store(tmp_path: Path, there: str) -> None:
    directory = tmp_path / "pages"
    if there != "no directory":
        directory.mkdir()
    if there == "empty environment":
        lmdb.open(str(directory)).close()
    with pytest.raises(BackendError, match="no store"):
        opened(directory, read_only=True)
    assert directory.exists() == (there != "no directory")


def test_read_only_does_not_replace_a_damaged_file(tmp_path: Path) -> None:
    filled(tmp_path)
    os.truncate(data_file(tmp_path), data_file(tmp_path).stat().st_size // 2)
    with pytest.raises(BackendError, match="damaged"):
        opened(tmp_path, read_only=True)
    assert not aside(tmp_path)


def test_a_read_only_directory_without_a_lock_file_is_read_without_one(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "lock.mdb").unlink()
    output = Child(
        """
        import subprocess
        subprocess.run(["mount", "--bind", sys.argv[1], sys.argv[1]], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", sys.argv[1]], check=True)
        backend = opened(sys.argv[1], read_only=True)
        assert found(backend, range(200), 8192) == [True] * 200
        backend.close()
        try:
            opened(sys.argv[1])
        except BackendError as error:
            print(error)
        """.replace(
            "import subprocess", "import subprocess; from hicache_storage import BackendError"
        ),
        tmp_path,
        prefix=own_mounts(),
    ).end()
    assert "Read-only file system" in output
    assert not (tmp_path / "lock.mdb").exists()


def test_a_lock_file_that_may_not_be_written_to_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    real = os.access
    monkeypatch.setattr(
        opening.os,
        "access",
        lambda path, mode: not str(path).endswith("lock.mdb") and real(path, mode),
    )
    with pytest.raises(ConfigError, match=r"lock\.mdb can't be written to"):
        opened(tmp_path, read_only=True)
