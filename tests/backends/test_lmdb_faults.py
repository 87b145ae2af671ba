"""Full disks, killed processes, damaged and foreign files, and file systems that LMDB can't use."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import lmdb
import pytest
from backends.lmdb_rig import (
    Child,
    check_consistency,
    extent,
    file_bytes,
    found,
    key,
    opened,
    store,
)

from hicache_storage import BackendError, BackendUnavailable, ConfigError
from hicache_storage.backends import mounts
from hicache_storage.backends.lmdb import LmdbBackend, datafile, judging, opening
from hicache_storage.backends.lmdb import environment as environment_module
from hicache_storage.backends.lmdb.datafile import needed_bytes, read_meta

MIB = 1 << 20


def own_mounts() -> tuple[str, ...]:
    """A command prefix for a child that may mount for itself."""
    if os.geteuid() == 0:
        prefix: tuple[str, ...] = ("unshare", "--mount", "--propagation", "private")
    else:
        prefix = ("unshare", "--user", "--map-root-user", "--mount")
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare, to mount a small file system")
    if done.returncode:
        pytest.skip(f"may not mount a small file system here: {done.stderr!r}")
    return prefix


# -- full disks ----------------------------------------------------------------------------------

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


# -- killed processes ----------------------------------------------------------------------------


def test_readers_that_were_killed_do_not_use_up_the_reader_table(tmp_path: Path) -> None:
    output = Child(
        """
        import signal
        backend = opened(sys.argv[1], max_readers=140)
        store(backend, [1])
        ready, told = os.pipe()
        children = []
        for _ in range(140):
            child = os.fork()
            if child == 0:
                with backend.environment.reading():
                    os.write(told, b"x")
                    time.sleep(60)
                os._exit(1)
            children.append(child)
            assert os.read(ready, 1) == b"x"
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        handle = backend.environment.handle
        assert len(handle.readers().splitlines()) == 141  # all slots, and a title
        assert found(backend, [1, 2]) == [True, False]
        assert backend.environment.reader_count() == 0
        backend.close()
        print("good")
        """,
        tmp_path,
    ).end()
    assert output == "good\n"


def test_more_living_readers_than_slots_is_an_error_that_says_so_and_passes(
    tmp_path: Path,
) -> None:
    backend = opened(tmp_path, max_readers=2)
    store(backend, [1])
    environment = backend.environment
    with environment.reading(), environment.reading():
        with pytest.raises(BackendUnavailable, match="max_readers") as caught:
            found(backend, [1])
        assert caught.value.retryable
    assert found(backend, [1]) == [True]
    backend.close()


def test_opening_clears_the_slots_of_killed_readers(tmp_path: Path) -> None:
    keeper = opened(tmp_path)
    store(keeper, [1])
    reader = Child(
        """
        backend = opened(sys.argv[1])
        with backend.environment.reading():
            print("reading", flush=True)
            time.sleep(60)
        """,
        tmp_path,
    )
    with reader:
        assert reader.line() == "reading"
        assert keeper.environment.reader_count() == 1
        reader.kill()
    assert keeper.environment.reader_count() == 1
    with Child("opened(sys.argv[1]).close()", tmp_path) as opener:
        opener.end()
    assert keeper.environment.reader_count() == 0
    keeper.close()


@pytest.mark.parametrize("durability", ["ordered", "sync", "async"])
def test_a_writer_killed_at_any_moment_leaves_a_sound_file_and_whole_pages(
    tmp_path: Path, durability: str
) -> None:
    chance = random.Random(durability)
    acknowledged: set[int] = set()
    for round_number in range(8):
        writer = Child(
            """
            import itertools
            options = {"map_size": 1 << 20, "capacity": 48 << 20}
            backend = opened(sys.argv[1], durability=sys.argv[2], **options)
            first = int(sys.argv[3])
            for start in itertools.count(first, 4):
                done = store(backend, range(start, start + 4), 1 << 18)
                print(start, all(done), flush=True)
            """,
            tmp_path,
            durability,
            round_number * 100_000,
        )
        with writer:
            for _ in range(chance.randrange(1, 30)):
                start, done = writer.line().split()
                assert done == "True"
                acknowledged |= set(range(int(start), int(start) + 4))
            writer.kill()
        extent(tmp_path)
        backend = opened(tmp_path, durability=durability, capacity=48 << 20)
        newest = sorted(acknowledged)[-40:]
        assert found(backend, newest, 1 << 18) == [True] * len(newest)
        check_consistency(backend)
        backend.close()


# -- damaged files -------------------------------------------------------------------------------


def filled(directory: Path, count: int = 200, **options: object) -> None:
    backend = opened(directory, **options)
    assert store(backend, range(count), 8192) == [True] * count
    backend.close()


def data(directory: Path) -> Path:
    return directory / "data.mdb"


def aside(directory: Path) -> list[Path]:
    return list(directory.glob("data.mdb.damaged-*"))


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
    before = data(tmp_path).stat().st_size
    length = {
        "half": before // 2,
        "one byte": before - 4097,
        "two pages": 8192,
        "one page": 4096,
        "100 bytes": 100,
    }[share]
    os.truncate(data(tmp_path), length)
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
    with open(data(tmp_path), "rb") as file:
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
        os.truncate(data(tmp_path), (whole.last_used + 1) * whole.page_bytes)
    output = Child(OPEN_AND_USE, tmp_path).end()
    assert output == "hits 200\n"
    assert not aside(tmp_path)


@pytest.mark.parametrize("what", ["zeros", "random", "text", "both metas"])
def test_a_file_that_is_no_lmdb_file_is_put_aside(tmp_path: Path, what: str) -> None:
    filled(tmp_path)
    raw = bytearray(data(tmp_path).read_bytes())
    if what == "both metas":
        raw[:8192] = bytes(8192)
    else:
        raw[:] = {
            "zeros": bytes(len(raw)),
            "random": random.Random(1).randbytes(len(raw)),
            "text": b"not a database\n" * (len(raw) // 15),
        }[what][: len(raw)]
    data(tmp_path).write_bytes(raw)
    assert Child(OPEN_AND_USE, tmp_path).end().endswith("hits 0\n")
    assert [path.read_bytes() for path in aside(tmp_path)] == [bytes(raw)]


def test_only_the_latest_damaged_file_is_kept(tmp_path: Path) -> None:
    for round_number in range(3):
        data(tmp_path).write_bytes(b"x" * (10_000 + round_number))
        opened(tmp_path).close()
        (kept,) = aside(tmp_path)
        assert kept.stat().st_size == 10_000 + round_number
        shutil.move(kept, f"{kept}-earlier")


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
    raw = data(directory).read_bytes()
    with open(data(directory), "rb") as file:
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
    with open(data(tmp_path), "r+b") as file:
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
        inode = data(tmp_path).stat().st_ino
        backend = opened(tmp_path)
        assert found(backend, range(200), 8192) == [True] * 200
        assert data(tmp_path).stat().st_ino == inode
        user.tell()
        user.end()
        backend.close()


# -- files and directories of others -------------------------------------------------------------


def test_an_environment_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=2) as handle, handle.begin(write=True) as txn:
        txn.put(b"their key", b"their value")
    before = data(tmp_path).read_bytes()
    with pytest.raises(ConfigError, match="their key"):
        opened(tmp_path)
    assert data(tmp_path).read_bytes() == before
    assert not aside(tmp_path)


def test_a_file_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    filled(tmp_path)
    raw = bytearray(data(tmp_path).read_bytes())
    for meta in (0, 4096):
        struct.pack_into("=I", raw, meta + 20, 3)
    data(tmp_path).write_bytes(raw)
    with pytest.raises(ConfigError, match="format 3"):
        opened(tmp_path)
    shifted = bytes(8) + bytes(raw[:-8])
    data(tmp_path).write_bytes(shifted)
    with pytest.raises(ConfigError, match="format"):
        opened(tmp_path)
    assert data(tmp_path).read_bytes() == shifted
    assert not aside(tmp_path)


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


def test_a_newer_layout_of_this_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    filled(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=4) as handle:
        totals = handle.open_db(b"totals")
        with handle.begin(write=True) as txn:
            txn.put(b"format", b"hicache-storage lmdb 2", db=totals)
    with pytest.raises(ConfigError, match="lmdb 2"):
        opened(tmp_path)
    assert not aside(tmp_path)


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


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(ConfigError, match="not a directory"):
        opened(tmp_path / "file")


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
    assert not data(tmp_path / "new").exists()
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


# -- reading only --------------------------------------------------------------------------------


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
    os.truncate(data(tmp_path), data(tmp_path).stat().st_size // 2)
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


def test_an_unopened_backend_says_so() -> None:
    from hicache_storage.backends.lmdb import LmdbConfig

    with pytest.raises(BackendError, match="not open"):
        LmdbBackend(LmdbConfig("/nowhere")).exists(["x"])


def test_stale_readers_are_looked_for_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a reader that was killed would keep every page freed since from being reused."""
    monkeypatch.setattr(environment_module, "READER_CHECK_S", 0.0)
    backend = opened(tmp_path, durability="async")
    store(backend, range(100), 65536)
    reader = Child(
        """
        backend = opened(sys.argv[1], durability="async")
        with backend.environment.reading():
            print("reading", flush=True)
            time.sleep(60)
        """,
        tmp_path,
    )
    with reader:
        assert reader.line() == "reading"
        reader.kill()
    for _ in range(8):
        backend.delete([key(number) for number in range(100)])
        assert store(backend, range(100), 65536) == [True] * 100
    assert file_bytes(tmp_path) < 3 * 100 * 65536
    backend.close()
