"""One environment per process and directory; forks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

import lmdb
import pytest
from backends.lmdb_rig import Child, check_consistency, found, opened, store

from hicache_storage import BackendError, ConfigError, open_store
from hicache_storage.backends.lmdb import LmdbConfig, sharing


def names_of(directory: Path) -> dict[str, str]:
    """The directory under each name that leads there."""
    (directory.parent / "link").symlink_to(directory)
    (directory.parent / "other").mkdir()
    return {
        "itself": str(directory),
        "slash": f"{directory}/",
        "relative": os.path.relpath(directory),
        "dots": f"{directory.parent}/other/../{directory.name}",
        "symlink": str(directory.parent / "link"),
    }


@pytest.mark.parametrize("name", ["itself", "slash", "relative", "dots", "symlink"])
@pytest.mark.parametrize("first_closed", [0, 1])
def test_stores_on_one_directory_share_one_environment_whatever_its_name(
    tmp_path: Path, name: str, first_closed: int
) -> None:
    directory = tmp_path / "pages"
    directory.mkdir()
    stores = [opened(directory), opened(names_of(directory)[name])]
    assert stores[0].environment is stores[1].environment
    for i, backend in enumerate(stores):
        assert store(backend, [i]) == [True]
        assert found(backend, [0, 1]) == [True, i == 1]
    stores.pop(first_closed).close()
    for round_number in range(3):
        assert found(stores[0], [0, 1, 2]) == [True, True, round_number > 0]
        assert store(stores[0], [2]) == [True]
    stores[0].close()


def test_the_last_store_to_close_closes_the_environment_and_it_can_be_opened_again(
    tmp_path: Path,
) -> None:
    for round_number in range(3):
        first, second = opened(tmp_path), opened(tmp_path)
        environment = first.environment
        first.close()
        assert environment.handle is not None
        second.close()
        assert environment.handle is None
        assert not sharing.is_open(str(tmp_path))
        with open_store(f"lmdb://{tmp_path}") as again:
            assert again.usage().pages == 0, round_number


def test_a_directory_made_anew_under_the_same_name_is_another_store(tmp_path: Path) -> None:
    directory = tmp_path / "pages"
    old = opened(directory)
    store(old, [1])
    directory.rename(tmp_path / "moved")
    if lmdb.__version__.startswith("2."):  # these releases tell directories apart by name only
        with pytest.raises(BackendError, match="already open"):
            opened(directory)
        old.close()
        return
    new = opened(directory)
    assert new.environment is not old.environment
    assert found(new, [1]) == [False]
    assert store(new, [2]) == [True]
    assert found(old, [1, 2]) == [True, False]
    new.close()
    assert found(old, [1]) == [True]
    old.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("durability", "sync"),
        ("max_size", 1 << 40),
        ("read_only", True),
    ],
)
def test_two_stores_of_a_process_must_agree_on_what_the_environment_is_opened_with(
    tmp_path: Path, option: str, value: object
) -> None:
    first = opened(tmp_path)
    with pytest.raises(ConfigError, match=option):
        opened(tmp_path, **{option: value})
    assert store(first, [1]) == [True]
    other_capacity = opened(tmp_path, capacity=1 << 30)
    assert found(other_capacity, [1]) == [True]
    other_capacity.close()
    first.close()


def test_threads_that_open_use_and_close_stores_on_one_directory_do_not_disturb_each_other(
    tmp_path: Path,
) -> None:
    failures: list[BaseException] = []

    def use(thread: int) -> None:
        try:
            for round_number in range(12):
                backend = opened(tmp_path, durability="async")
                number = thread * 100 + round_number
                assert store(backend, [number]) == [True]
                assert found(backend, [number]) == [True]
                backend.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not sharing.is_open(str(tmp_path))


# -- forks ---------------------------------------------------------------------------------------


def end_of(child: int) -> int:
    """Exit status of a forked child, within a minute."""
    for _ in range(6000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    raise AssertionError("the forked child did not end")


def in_child(work: object) -> int:
    """Forks, has the child call `work`, and gives its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()  # type: ignore[operator]
            status = 0
        finally:
            os._exit(status)
    return end_of(child)


def test_a_child_that_never_uses_the_store_leaves_the_parents_reads_alone(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    store(backend, range(4))
    for _ in range(5):
        assert found(backend, range(4)) == [True] * 4
        assert in_child(lambda: None) == 0
        # An orderly end runs finalizers too: as a script does, not only os._exit.
        assert found(backend, range(4)) == [True] * 4
        assert store(backend, range(4, 6)) == [True] * 2
    backend.close()


def test_parent_and_child_both_read_and_write_after_a_fork(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    store(backend, range(4))

    def work() -> None:
        assert found(backend, range(5)) == [True] * 4 + [False]
        assert store(backend, [10]) == [True]
        assert in_child(lambda: store(backend, [11])) == 0  # a child of the child
        backend.flush()
        backend.close()

    for _ in range(3):
        assert in_child(work) == 0
        assert found(backend, [0, 3, 10, 11]) == [True] * 4
        assert backend.delete(["nothing"]) == [True]
    assert check_consistency(backend) == 6
    backend.close()


def test_forks_while_other_threads_read_and_write_break_neither_side(tmp_path: Path) -> None:
    output = Child(
        """
        import threading
        from backends.test_lmdb_sharing import in_child
        backend = opened(sys.argv[1], durability="async")
        store(backend, range(8), 1 << 18)
        stop, failures, rounds = threading.Event(), [], [0]
        def read():
            while not stop.is_set():
                try:
                    assert found(backend, range(8), 1 << 18) == [True] * 8
                    rounds[0] += 1
                except BaseException as error:
                    failures.append(repr(error))
                    return
        def write():
            number = 100
            while not stop.is_set():
                try:
                    assert store(backend, [number % 20 + 100], 1 << 18) == [True]
                    number += 1
                except BaseException as error:
                    failures.append(repr(error))
                    return
        threads = [threading.Thread(target=f) for f in (read, read, write)]
        for thread in threads: thread.start()
        def work():
            assert found(backend, range(8), 1 << 18) == [True] * 8
            assert store(backend, [50]) == [True]
        for _ in range(15):
            assert in_child(work) == 0
        stop.set()
        for thread in threads: thread.join(30)
        assert not failures, failures
        assert rounds[0] > 0
        check_consistency(backend)
        print("good")
        """,
        tmp_path,
    ).end()
    assert output == "good\n"


@pytest.mark.parametrize("error", [None, KeyError("in the middle")])
def test_a_reader_slot_is_free_as_soon_as_the_read_ends_whoever_still_knows_it(
    tmp_path: Path, error: Exception | None
) -> None:
    """A fork that came later would find it in another thread's frame, and free it once more."""
    backend = opened(tmp_path)
    store(backend, [1])
    known = []
    with contextlib.suppress(KeyError), backend.environment.reading() as (txn, trees):
        known.append(txn)
        assert txn.get(b"nothing", db=trees.pages) is None
        assert backend.environment.reader_count() == 1
        if error is not None:
            raise error
    assert error is None or error.__traceback__ is not None
    assert backend.environment.reader_count() == 0
    with pytest.raises(AttributeError):
        known[0].get(b"nothing")
    backend.close()


def test_a_child_born_in_the_middle_of_a_read_leaves_the_parents_reader_slot_alone(
    tmp_path: Path,
) -> None:
    output = Child(
        """
        import threading
        from hicache_storage.backends.lmdb import environment
        from backends.test_lmdb_sharing import in_child
        environment.FORK_WAIT_S = 0.2  # the read below outlasts it
        backend = opened(sys.argv[1])
        store(backend, range(3))
        inside, go = threading.Event(), threading.Event()
        def read():
            with backend.environment.reading() as (txn, trees):
                inside.set()
                assert go.wait(30)
                slots.append(backend.environment.reader_count())
        slots = []
        thread = threading.Thread(target=read)
        thread.start()
        assert inside.wait(30)
        def work():
            try:
                found(backend, range(3))
            except Exception as error:
                assert "already open" in str(error), error
        assert in_child(work) == 0
        go.set()
        thread.join(30)
        assert slots == [1], slots
        assert found(backend, range(3)) == [True] * 3
        assert store(backend, [4]) == [True]
        backend.close()
        print("good")
        """,
        tmp_path,
    ).end()
    assert output == "good\n"


def test_a_fork_by_c_code_is_noticed_at_the_next_use(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    store(backend, range(3))
    inherited = backend.environment.handle
    child = ctypes.CDLL(None).fork()
    if child == 0:
        status = 1
        try:
            assert found(backend, range(3)) == [True] * 3
            assert store(backend, [9]) == [True]
            assert backend.environment.handle is not inherited
            status = 0
        finally:
            os._exit(status)
    assert end_of(child) == 0
    assert backend.environment.handle is inherited
    assert found(backend, [0, 1, 2, 9]) == [True] * 4
    backend.close()


def test_a_child_leaves_the_uses_that_its_parent_noted_to_the_parent(tmp_path: Path) -> None:
    backend = opened(tmp_path, capacity=1 << 30, recency_s=0)
    store(backend, range(3))
    time.sleep(0.01)
    backend._recency.used(b"a page", 0)
    assert backend._recency.pending == 1

    def work() -> None:
        assert backend._recency.take() == []

    assert in_child(work) == 0
    assert backend._recency.pending == 1
    backend.close()


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="map_size"):
        LmdbConfig("/x", map_size=1 << 30, max_size=1 << 29)
    for wrong in ({"capacity": 0}, {"max_readers": 0}, {"recency_s": -1.0}, {"map_size": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LmdbConfig("/x", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="path"):
        LmdbConfig("")
