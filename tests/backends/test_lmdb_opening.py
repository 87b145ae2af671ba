"""Where an environment may lie, and who opens it first: mounts, network file systems, waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from backends.lmdb_rig import Child, data_file, filled, opened

from hicache_storage import BackendError, BackendUnavailable, ConfigError
from hicache_storage.backends import mounts
from hicache_storage.backends.lmdb import LmdbBackend, judging, opening

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:50 / /net rw - nfs4 server:/export rw,vers=4.2
31 22 0:51 / /net/local rw - xfs /dev/sdb rw
32 22 0:52 / /mnt/with\\040blank rw - cifs //server/share rw
33 22 0:53 / /bucket rw - fuse.s3fs s3fs rw
34 22 0:54 / /gcs rw - fuse.gcsfuse bucket rw
35 22 0:55 / /host rw - 9p host rw
36 22 0:56 / /over rw - overlay overlay rw
37 22 0:57 / /over rw - tmpfs tmpfs rw
38 22 0:58 / /enc rw - fuse.gocryptfs enc rw
39 22 0:59 / /lu rw - lustre x rw
"""


@pytest.mark.parametrize(
    ("directory", "kind", "trust"),
    [
        ("/var/cache", "ext4", "local"),
        ("/net", "nfs4", "network"),
        ("/net/kv", "nfs4", "network"),
        ("/network", "ext4", "local"),
        ("/net/local/kv", "xfs", "local"),
        ("/mnt/with blank/kv", "cifs", "network"),
        ("/bucket/kv", "fuse.s3fs", "network"),
        ("/gcs", "fuse.gcsfuse", "network"),
        ("/host/kv", "9p", "doubtful"),
        ("/over/kv", "tmpfs", "local"),
        ("/enc/kv", "fuse.gocryptfs", "doubtful"),
        ("/lu/kv", "lustre", "network"),
    ],
)
def test_the_file_system_of_a_directory_is_that_of_its_innermost_mount(
    directory: str, kind: str, trust: str
) -> None:
    assert mounts.file_system(directory, MOUNTS) == kind
    assert mounts.trust(kind) == trust


def test_a_network_file_system_is_refused_unless_it_is_allowed_and_then_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "file_system", lambda path: "nfs4")
    with pytest.raises(ConfigError, match="network file system"):
        opened(tmp_path / "new")
    assert not data_file(tmp_path / "new").exists()
    opened(tmp_path / "new", allow_network=True).close()
    assert "nfs4" in caplog.text
    caplog.clear()
    monkeypatch.setattr(opening, "file_system", lambda path: "9p")
    opened(tmp_path / "new").close()
    assert "9p" in caplog.text
    caplog.clear()
    monkeypatch.setattr(opening, "file_system", lambda path: "ext4")
    opened(tmp_path / "new").close()
    assert not caplog.records


def test_opening_waits_for_whoever_has_the_setup_lock_and_gives_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    monkeypatch.setattr(judging, "SETUP_WAIT_S", 0.2)
    with (
        judging.setup_lock(str(tmp_path)),
        pytest.raises(BackendUnavailable, match="opening or compacting"),
    ):
        opened(tmp_path)
    opened(tmp_path).close()


def test_processes_that_open_a_new_store_at_once_all_get_the_same_one(tmp_path: Path) -> None:
    children = [
        Child(
            """
            sys.stdin.readline()
            backend = opened(sys.argv[1] + "/pages", durability="async")
            assert store(backend, [int(sys.argv[2])]) == [True]
            print("stored", flush=True)
            sys.stdin.readline()
            print(found(backend, range(6)).count(True))
            backend.close()
            """,
            tmp_path,
            number,
        )
        for number in range(6)
    ]
    for child in children:
        child.tell()
    for child in children:
        assert child.line() == "stored"
    for child in children:
        with child:
            child.tell()
            assert child.end() == "6\n"


def test_an_unopened_backend_says_so() -> None:
    from hicache_storage.backends.lmdb import LmdbConfig

    with pytest.raises(BackendError, match="not open"):
        LmdbBackend(LmdbConfig("/nowhere")).exists(["x"])
