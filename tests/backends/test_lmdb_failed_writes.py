"""Full disks, file limits and failed commits cost pages, never the process or the store."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb
import pytest
from backends.children import own_mounts
from backends.lmdb_rig import Child, found, opened, store

from hicache_storage import BackendError

FILL = """
backend = opened(sys.argv[1], durability=sys.argv[2], **eval(sys.argv[3]))
answers = []
for start in range(0, 320, 16):
    answers += store(backend, range(start, start + 16), 65536)
there = found(backend, range(320), 65536)
if backend.config.capacity is None:
    stored = answers.count(True)
    assert 60 <= stored < 128, stored
    assert there == answers == [True] * stored + [False] * (320 - stored)
    assert backend.delete([key(i) for i in range(60)]) == [True] * 60
    for _ in range(2):
        backend.batch_set([key(0)], [page(0, 100)])
    assert store(backend, range(400, 420), 65536) == [True] * 20
else:
    assert answers == [True] * 320
    assert 20 < there.count(True) < 128
check_consistency(backend)
backend.close()
print("good")
"""


@pytest.mark.parametrize("durability", ["ordered", "async"])
@pytest.mark.parametrize("options", ["{}", "{'capacity': 1 << 30}"])
def test_a_full_disk_fails_pages_and_never_the_process(
    tmp_path: Path, durability: str, options: str
) -> None:
    mount = """
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", sys.argv[1]], check=True)
"""
    output = Child(mount + FILL, tmp_path, durability, options, prefix=own_mounts()).end()
    assert output.endswith("good\n")


@pytest.mark.parametrize("options", ["{}", "{'capacity': 1 << 30}"])
def test_a_file_that_may_not_grow_fails_pages_and_never_the_process(
    tmp_path: Path, options: str
) -> None:
    limit = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
"""
    output = Child(limit + FILL, tmp_path, "async", options).end()
    assert output.endswith("good\n")


@pytest.mark.parametrize(
    ("code", "full"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EFBIG, True),
        (errno.EIO, False),
        (errno.EACCES, False),
    ],
)
def test_only_lack_of_room_makes_a_failed_commit_a_refused_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, full: bool
) -> None:
    backend = opened(tmp_path)
    store(backend, [1])

    def fail(self: object, *arguments: object, **options: object) -> None:
        raise lmdb.Error(f"mdb_txn_commit: {os.strerror(code)}")

    monkeypatch.setattr("hicache_storage.backends.lmdb.writing.Changes.finish", fail)
    if full:
        assert store(backend, [2, 3]) == [False, False]
    else:
        with pytest.raises(BackendError, match=os.strerror(code)):
            store(backend, [2, 3])
    monkeypatch.undo()
    assert found(backend, [1, 2]) == [True, False]
    assert store(backend, [2]) == [True]
    backend.close()


def test_after_a_failed_write_of_the_meta_page_the_environment_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    store(backend, [1])
    first = backend.environment.handle

    class Panicking:
        def __init__(self) -> None:
            self.closed = False

        def begin(self, **_: object) -> None:
            raise lmdb.PanicError("mdb_txn_begin: MDB_PANIC: Update of meta page failed")

        def close(self) -> None:
            self.closed = True
            first.close()

    broken = Panicking()
    monkeypatch.setattr(backend.environment, "_handle", broken)
    assert found(backend, [1]) == [True]
    assert broken.closed
    assert store(backend, [2]) == [True]
    backend.close()
