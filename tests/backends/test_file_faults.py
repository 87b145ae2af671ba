"""What goes wrong with one page is a miss or False; its neighbours, and the old page, stay."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backends.file_rig import (
    Child,
    found,
    key,
    opened,
    page,
    page_files,
    path_of,
    store,
    temp_files,
)

from hicache_storage.backends.file import reading, renaming

READ_ERRORS = ["EIO", "EACCES", "EPERM", "EMFILE", "ENFILE", "ENOMEM", "ELOOP", "ENXIO"]
WRITE_ERRORS = ["EIO", "EACCES", "EPERM", "EMFILE", "ENFILE", "ENOMEM", "EROFS", "EFBIG"]


class Failing:
    """Makes an `os` function fail where it is told to, and counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, module: Any = os) -> None:
        self.real = getattr(module, name)
        self.calls: list[tuple[Any, ...]] = []
        self.errors: list[int] = []
        """errno of the calls to come, 0 for one that works; then all work."""
        self.always = 0
        self.where: Callable[..., bool] = lambda *args, **kwargs: True
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.where(*args, **kwargs):
            return self.real(*args, **kwargs)
        self.calls.append(args)
        number = self.errors.pop(0) if self.errors else self.always
        if number:
            raise OSError(number, os.strerror(number))
        return self.real(*args, **kwargs)


def is_page(number: int) -> Callable[..., bool]:
    return lambda path, *rest, **kwargs: str(path).endswith(key(number)[33:])


def is_temp(path: Any, *rest: Any, **kwargs: Any) -> bool:
    return str(path).endswith(".tmp")


# -- damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [511 + 64, 64, 63, 1, 0])
def test_a_cut_page_is_a_miss_then_gone_and_spoils_no_neighbour(
    tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(tmp_path, capacity=1 << 20)
    assert store(backend, range(4)) == [True] * 4
    os.truncate(path_of(tmp_path, 2), left)
    with caplog.at_level(logging.WARNING):
        assert found(backend, range(4)) == [True, True, False, True]
        assert found(backend, range(4)) == [True, True, False, True]
    assert len([line for line in caplog.messages if "cut page" in line]) == 1
    assert backend.exists([key(i) for i in range(4)]) == 2
    assert not path_of(tmp_path, 2).exists()
    assert store(backend, [2]) == [True]
    assert found(backend, range(4)) == [True] * 4


def test_a_page_longer_than_its_header_says_is_gone_and_one_of_another_length_stays(
    tmp_path: Path,
) -> None:
    backend = opened(tmp_path)
    assert store(backend, [1]) == [True]
    with path_of(tmp_path, 1).open("ab") as file:
        file.write(b"more")
    assert found(backend, [1]) == [False]
    assert not path_of(tmp_path, 1).exists()
    assert store(backend, [2], size=400) == [True]
    assert found(backend, [2], size=512) == [False]
    assert found(backend, [2], size=400) == [True]
    path_of(tmp_path, 3).parent.mkdir(exist_ok=True)
    path_of(tmp_path, 3).write_bytes(b"not one of our headers" * 20)
    assert found(backend, [3]) == [False]
    assert path_of(tmp_path, 3).exists()  # nothing proves it bad


def test_a_lookup_that_said_hit_is_wrong_at_most_once(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    assert store(backend, [1]) == [True]
    os.truncate(path_of(tmp_path, 1), 300)
    lookups = []
    for _ in range(5):
        lookups.append(backend.exists([key(1)]))
        assert found(backend, [1]) == [False]
    assert lookups in ([1, 0, 0, 0, 0], [0] * 5)


def test_a_page_of_zeros_as_a_power_cut_leaves_it_never_reaches_a_caller(
    tmp_path: Path, target_namespace: Any, hashes: Callable[[int], list[str]]
) -> None:
    from hicache_storage import open_store

    with open_store(f"file://{tmp_path}/root", min_free=0) as opened_store:
        keys = hashes(3)
        assert opened_store.batch_set(target_namespace, keys, [bytes([7] * 512)] * 3) == [True] * 3
        for file in page_files(tmp_path / "root"):
            if file.name == keys[1]:
                file.write_bytes(bytes(576))
        buffers = [bytearray(512) for _ in keys]
        hits = opened_store.batch_get(target_namespace, keys, buffers)
        assert hits == [True, False, True]
        assert opened_store.exists(target_namespace, keys) == 1
        assert opened_store.batch_set(target_namespace, keys, [bytes([7] * 512)] * 3) == [True] * 3
        assert opened_store.batch_get(target_namespace, keys, buffers) == [True] * 3


# -- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ_ERRORS)
@pytest.mark.parametrize("function", ["open", "preadv"])
def test_a_page_that_can_not_be_read_is_a_miss_logged_once_and_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: str,
    name: str,
) -> None:
    backend = opened(tmp_path)
    assert store(backend, range(3)) == [True] * 3
    failing = Failing(monkeypatch, function)
    if function == "open":
        failing.where = is_page(1)
    else:
        failing.errors = [0, getattr(errno, name), 0] * 5
    failing.always = getattr(errno, name) if function == "open" else 0
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert found(backend, range(3)) == [True, False, True]
    assert len([line for line in caplog.messages if f"read, {name}" in line]) == 1
    monkeypatch.undo()
    assert found(backend, range(3)) == [True] * 3  # neither deleted nor remembered as bad
    assert backend.exists([key(i) for i in range(3)]) == 3


def test_reading_leaves_the_time_of_access_alone(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    assert store(backend, [1]) == [True]
    path = path_of(tmp_path, 1)
    os.utime(path, (1.0, path.stat().st_mtime))
    assert found(backend, [1]) == [True]
    assert path.stat().st_atime == 1.0


def test_a_page_of_another_user_whose_time_of_access_is_not_ours_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, real = opened(tmp_path), os.open
    assert store(backend, [1]) == [True]

    def foreign(path: str, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_NOATIME:
            raise PermissionError(errno.EPERM, "not the owner", path)
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", foreign)
    assert found(backend, [1]) == [True]
    assert store(backend, [1]) == [True]
    assert not backend._session.failures.counts  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["ESTALE", "ENOENT"])
def test_a_file_that_was_replaced_meanwhile_is_looked_for_once_more_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    backend = opened(tmp_path)
    assert store(backend, range(3)) == [True] * 3
    failing = Failing(monkeypatch, "open")
    failing.where = is_page(1)
    with caplog.at_level(logging.WARNING):
        failing.errors = [getattr(errno, name)]
        assert found(backend, range(3)) == [True] * 3
        assert len(failing.calls) == 2
        failing.calls, failing.always = [], getattr(errno, name)
        assert found(backend, range(3)) == [True, False, True]
        assert len(failing.calls) == 2
    assert caplog.messages == []


def test_an_error_from_closing_after_a_whole_read_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    assert store(backend, [1]) == [True]
    failing = Failing(monkeypatch, "close")
    closing = failing.real

    def close(fd: int) -> None:
        closing(fd)
        raise OSError(errno.EIO, "late")

    monkeypatch.setattr(os, "close", close)
    assert found(backend, [1]) == [True]


def test_a_page_evicted_between_lookup_and_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the check of its directory and the opening of its file, with the directory."""
    backend = opened(tmp_path)
    assert store(backend, range(3)) == [True] * 3
    check = type(backend._session.directories).check  # type: ignore[union-attr]

    def racing(self: Any, place: str) -> str:
        found_path: str = check(self, place)
        shutil.rmtree(path_of(tmp_path, 1).parent, ignore_errors=True)
        return found_path

    monkeypatch.setattr(type(backend._session.directories), "check", racing)  # type: ignore[union-attr]
    assert found(backend, range(3)) == [True, False, True]


def test_what_was_published_while_a_cut_page_was_judged_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other = opened(tmp_path), opened(tmp_path)
    assert store(backend, [1]) == [True]
    os.truncate(path_of(tmp_path, 1), 300)
    look = reading.read_header

    def racing(fd: int) -> bytes:
        header = look(fd)
        assert store(other, [1], version=2) == [True]
        return header

    monkeypatch.setattr(reading, "read_header", racing)
    assert found(backend, [1]) == [False]
    monkeypatch.undo()
    assert found(backend, [1], versions=[2]) == [True]


# -- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITE_ERRORS)
@pytest.mark.parametrize("function", ["open", "pwritev", "close", "_rename"])
def test_a_page_that_can_not_be_written_is_false_leaves_no_file_and_the_old_page_stands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: str,
    name: str,
) -> None:
    backend = opened(tmp_path)
    assert store(backend, range(3)) == [True] * 3
    failing = Failing(monkeypatch, function, renaming if function == "_rename" else os)
    if function in ("open", "_rename"):
        failing.where = is_temp
    if function == "close":
        # Of the page before: looked at, published. A network file system says here that it's full.
        real = failing.real
        failing.where = lambda fd: str(os.readlink(f"/proc/self/fd/{fd}")).endswith(".tmp")
        failing.real = real
    # Renaming takes two calls a page: one finds the name taken, the other exchanges.
    failing.errors = [0] * (3 if function == "_rename" else 1) + [getattr(errno, name)]
    with caplog.at_level(logging.WARNING):
        assert store(backend, range(3), version=1) == [True, False, True]
    assert len([line for line in caplog.messages if f"write, {name}" in line]) == 1
    monkeypatch.undo()
    assert temp_files(tmp_path) == []
    assert found(backend, range(3), versions=[0, 1]) == [True] * 3
    assert found(backend, [1], versions=[0]) == [True]
    assert store(backend, [1], version=1) == [True]
    assert found(backend, [1], versions=[1]) == [True]


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("function", ["open", "pwritev", "_rename"])
def test_a_full_disk_makes_room_once_and_then_refuses_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, name: str
) -> None:
    backend = opened(tmp_path)
    assert store(backend, range(40)) == [True] * 40
    for number in range(40):
        os.utime(path_of(tmp_path, number), (number, number))
    failing = Failing(monkeypatch, function, renaming if function == "_rename" else os)
    if function in ("open", "_rename"):
        failing.where = is_temp
    failing.errors = [getattr(errno, name)]
    assert store(backend, [100]) == [True]
    there = [path_of(tmp_path, number).exists() for number in range(40)]
    assert 0 < there.count(False) <= 6  # the tenth that was used least recently
    assert there == sorted(there)
    failing.calls, failing.always = [], getattr(errno, name)
    assert store(backend, [101]) == [False]
    assert len(failing.calls) == 2
    assert found(backend, [100, 101]) == [True, False]
    assert temp_files(tmp_path) == []


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=1 << 20)
    assert store(backend, range(3)) == [True] * 3
    for number in range(3):
        path_of(tmp_path, number).unlink()
        path_of(tmp_path, number).parent.rmdir()
    assert store(backend, [0, 1]) == [True, True]
    path_of(tmp_path, 0).unlink()
    path_of(tmp_path, 0).parent.rmdir()
    path_of(tmp_path, 1).unlink()
    path_of(tmp_path, 1).parent.rmdir()
    path_of(tmp_path, 1).parent.parent.rmdir()
    assert found(backend, range(3)) == [False] * 3
    assert store(backend, range(3)) == [True] * 3
    assert found(backend, range(3)) == [True] * 3


def test_the_same_page_is_not_written_again_and_another_one_is(tmp_path: Path) -> None:
    backend, other = opened(tmp_path), opened(tmp_path)
    assert store(backend, [1]) == [True]
    first = path_of(tmp_path, 1).stat()
    for again in (backend, other, opened(tmp_path, durability="fsync")):
        assert store(again, [1]) == [True]
        assert path_of(tmp_path, 1).stat().st_ino == first.st_ino
    assert store(other, [1], version=1) == [True]
    assert path_of(tmp_path, 1).stat().st_ino != first.st_ino
    assert found(backend, [1], versions=[1]) == [True]


def test_of_pages_behind_a_missing_one_only_the_next_is_written_again(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=1 << 20)
    assert store(backend, range(1, 6)) == [True] * 5
    before = [path_of(tmp_path, number).stat().st_ino for number in range(1, 6)]
    assert store(backend, range(8)) == [True] * 8
    after = [path_of(tmp_path, number).stat().st_ino for number in range(1, 6)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False] + [True] * 4
    assert found(backend, range(8)) == [True] * 8
    assert backend.usage() == (8, 8 * 576, 1 << 20)


@pytest.mark.parametrize("parts", [1, 7, 64, 1024, 2500])
@pytest.mark.parametrize("most", [1, 4096, 1 << 30])
def test_transfers_that_stop_halfway_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, most: int
) -> None:
    """The kernel may move fewer bytes than asked, and takes at most IOV_MAX spans a call."""
    size = 3000 if most == 1 else 300_000

    def cut(function: Any) -> Any:
        def short(fd: int, spans: Any, offset: int) -> int:
            assert len(spans) <= 1024
            left, some = most, []
            for span in spans:
                some.append(span[:left])
                left -= len(some[-1])
                if not left:
                    break
            moved: int = function(fd, some, offset)
            return moved

        return short

    monkeypatch.setattr(os, "pwritev", cut(os.pwritev))
    monkeypatch.setattr(os, "preadv", cut(os.preadv))
    backend = opened(tmp_path)
    written = page(1, size, parts)
    assert backend.batch_set([key(1)], [written]) == [True]
    assert path_of(tmp_path, 1).read_bytes() == b"".join(written)
    buffers = tuple(memoryview(bytearray(len(span))) for span in page(1, size, max(parts // 2, 1)))
    assert backend.batch_get([key(1)], [buffers]) == [True]
    assert b"".join(buffers) == b"".join(written)


@pytest.mark.parametrize("name", ["EINVAL", "ENOSYS", "EOPNOTSUPP"])
def test_a_file_system_that_can_not_exchange_names_gets_a_plain_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    backend = opened(tmp_path, capacity=1 << 20)
    failing = Failing(monkeypatch, "_rename", renaming)
    failing.always = getattr(errno, name)
    for version in range(3):
        assert store(backend, range(3), version=version) == [True] * 3
        assert found(backend, range(3), versions=[version]) == [True] * 3
    assert temp_files(tmp_path) == []
    assert backend.usage().stored_bytes >= 3 * 576  # too much, until the next recount


def test_replacing_leaves_the_account_exact_whoever_else_meets_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted, or set by another process, between any two steps of the writer."""
    backend, other = opened(tmp_path, capacity=1 << 20), opened(tmp_path, capacity=1 << 20)
    real = renaming._rename
    meetings = [
        lambda: None,
        lambda: other.delete([key(1)]),
        lambda: store(other, [1], version=99),
        lambda: other.delete([key(1)]) and store(other, [1], version=98),
    ]
    version = 0
    for first in meetings:
        for second in meetings:
            steps = [first, second]

            def racing(old: str, new: str, flags: int, steps: Any = steps) -> None:
                step = steps.pop(0) if steps else meetings[0]
                monkeypatch.setattr(renaming, "_rename", real)
                step()
                monkeypatch.setattr(renaming, "_rename", racing)
                real(old, new, flags)

            version += 1
            monkeypatch.setattr(renaming, "_rename", racing)
            assert store(backend, [1], version=version) == [True]
            monkeypatch.setattr(renaming, "_rename", real)
            assert found(backend, [1], versions=[version]) == [True]
            assert backend.usage() == (1, 576, 1 << 20)
    assert temp_files(tmp_path) == []


# -- descriptors ---------------------------------------------------------------------------------

FEW_DESCRIPTORS = """
import errno, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
real, fails = os.pwritev, random.Random(1)
def pwritev(*args):
    if fails.random() < 0.05:
        raise OSError(errno.ENOSPC, "full")
    return real(*args)
os.pwritev = pwritev
backend = opened(sys.argv[1], io_threads=int(sys.argv[2]), capacity=20000)
counts = set()
for turn in range(int(sys.argv[3])):
    store(backend, range(turn, turn + 32))
    found(backend, range(turn - 16, turn + 16))
    if turn > 20:
        counts.add(len(os.listdir("/proc/self/fd")))
print(min(counts), max(counts))
assert max(counts) - min(counts) <= 4, counts
backend.close()
"""


@pytest.mark.parametrize("threads", [1, 32])
def test_the_number_of_open_files_stays_small_whatever_fails(tmp_path: Path, threads: int) -> None:
    with Child(FEW_DESCRIPTORS, tmp_path, threads, 300 if threads == 1 else 60) as child:
        low, high = map(int, child.end().splitlines()[-1].split())
    assert high < 64
    assert low >= 3


def test_running_out_of_descriptors_is_a_miss_that_passes(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    assert store(backend, [1]) == [True]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
        assert backend.batch_get([key(1)], [page(1, 512)]) == [False]
        assert backend.batch_set([key(2)], [page(2)]) == [False]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store(backend, [2]) == [True]
    assert found(backend, [1, 2]) == [True, True]
