"""A file that is plainly damaged is put aside as it is, and a new one is made."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import lmdb
import pytest
from backends.lmdb_rig import Child, aside, data_file, extent, file_bytes, filled, opened

from hicache_storage.backends.lmdb.datafile import needed_bytes, read_meta

MIB = 1 << 20


OPEN_AND_USE = """
backend = opened(sys.argv[1])
hits = found(backend, range(200), 8192)
assert store(backend, range(300, 320), 8192) == [True] * 20
assert found(backend, range(300, 320), 8192) == [True] * 20
check_consistency(backend)
backend.close()
print("hits", sum(hits))
"""


@pytest.mark.parametrize("share", ["half", "one byte", "two pages", "one page", "100 bytes"])
def test_a_truncated_file_is_put_aside_before_it_can_kill_the_process(
    tmp_path: Path, share: str
) -> None:
    filled(tmp_path)
    before = data_file(tmp_path).stat().st_size
    length = {
        "half": before // 2,
        "one byte": before - 4097,
        "two pages": 8192,
        "one page": 4096,
        "100 bytes": 100,
    }[share]
    os.truncate(data_file(tmp_path), length)
    output = Child(OPEN_AND_USE, tmp_path).end()
    assert output.endswith("hits 0\n")
    assert "damaged" in output
    (kept,) = aside(tmp_path)
    assert kept.stat().st_size == length, "the damaged file is kept as it was"


def test_a_file_that_lost_only_free_pages_at_its_end_is_kept(tmp_path: Path) -> None:
    """LMDB itself leaves such files: pages that a transaction took and freed are not written."""
    filled(tmp_path)
    handle = lmdb.open(str(tmp_path), max_dbs=4, map_size=64 * MIB)
    bodies = handle.open_db(b"bodies")
    with open(data_file(tmp_path), "rb") as file:
        for size in range(5 * MIB, 60 * MIB, 5 * MIB):
            with handle.begin(write=True) as txn:
                txn.put(b"\xff" * 8, bytes(size), db=bodies)
                txn.delete(b"\xff" * 8, db=bodies)
            short = needed_bytes(read_meta(file.fileno())) > file_bytes(tmp_path)
            if short:
                break
    handle.close()
    if not short:  # this release fills the file up; cut off what is free
        whole = extent(tmp_path)
        os.truncate(data_file(tmp_path), (whole.last_used + 1) * whole.page_bytes)
    output = Child(OPEN_AND_USE, tmp_path).end()
    assert output == "hits 200\n"
    assert not aside(tmp_path)


@pytest.mark.parametrize("what", ["zeros", "random", "text", "both metas"])
def test_a_file_that_is_no_lmdb_file_is_put_aside(tmp_path: Path, what: str) -> None:
    filled(tmp_path)
    raw = bytearray(data_file(tmp_path).read_bytes())
    if what == "both metas":
        raw[:8192] = bytes(8192)
    else:
        raw[:] = {
            "zeros": bytes(len(raw)),
            "random": random.Random(1).randbytes(len(raw)),
            "text": b"not a database\n" * (len(raw) // 15),
        }[what][: len(raw)]
    data_file(tmp_path).write_bytes(raw)
    assert Child(OPEN_AND_USE, tmp_path).end().endswith("hits 0\n")
    assert [path.read_bytes() for path in aside(tmp_path)] == [bytes(raw)]


def test_only_the_latest_damaged_file_is_kept(tmp_path: Path) -> None:
    for round_number in range(3):
        data_file(tmp_path).write_bytes(b"x" * (10_000 + round_number))
        opened(tmp_path).close()
        (kept,) = aside(tmp_path)
        assert kept.stat().st_size == 10_000 + round_number
        shutil.move(kept, f"{kept}-earlier")
