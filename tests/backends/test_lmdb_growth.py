"""A map that is full grows, in one process and in several at once; it never shrinks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest
from backends.lmdb_rig import Child, check_consistency, file_bytes, found, key, opened, store

from hicache_storage import BackendError
from hicache_storage.backends.lmdb import environment as environment_module
from hicache_storage.backends.lmdb import opening
from hicache_storage.backends.lmdb.environment import Environment

MIB = 1 << 20
SMALL = {"map_size": MIB, "durability": "async"}


def test_a_full_map_in_the_middle_of_a_batch_grows_while_others_read(tmp_path: Path) -> None:
    backend = opened(tmp_path, **SMALL)
    assert store(backend, range(4), 65536) == [True] * 4
    stop, failures, rounds = threading.Event(), [], []

    def read() -> None:
        try:
            while not stop.is_set():
                assert found(backend, range(4), 65536) == [True] * 4
                rounds.append(1)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for batch in range(6):
        numbers = range(100 * batch, 100 * batch + 64)
        assert store(backend, numbers, 65536) == [True] * 64
        assert found(backend, numbers, 65536) == [True] * 64
    stop.set()
    for reader in readers:
        reader.join(60)
    assert not failures
    assert rounds
    assert backend.environment.map_bytes > 24 * MIB
    check_consistency(backend)
    backend.close()


def test_a_batch_that_meets_a_full_map_is_stored_whole_by_one_more_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, **SMALL)
    grown = []
    grow = Environment.grow
    monkeypatch.setattr(
        Environment, "grow", lambda self, *sizes: grown.append(sizes) or grow(self, *sizes)
    )
    assert store(backend, range(64), 65536) == [True] * 64
    assert len(grown) == 1, "once is enough for a batch"
    backend.close()


def test_a_store_at_its_largest_size_answers_false_and_goes_on_reading(tmp_path: Path) -> None:
    backend = opened(tmp_path, map_size=MIB, max_size=4 * MIB, durability="async")
    answers: list[bool] = []
    for start in range(0, 160, 16):
        answers += store(backend, range(start, start + 16), 65536)
    stored = [number for number, answer in enumerate(answers) if answer]
    assert 56 <= len(stored) < 64, "single pages fill what a whole batch doesn't fit in"
    assert stored == list(range(len(stored))), "what fits is stored, and nothing behind it"
    assert found(backend, range(160), 65536) == answers
    assert file_bytes(tmp_path) <= 4 * MIB
    assert backend.failures.counts["full"]
    # Room that is made is used again, two transactions later.
    assert backend.delete([key(number) for number in range(20)]) == [True] * 20
    for _ in range(3):
        assert store(backend, [900], 100) == [True]
        assert backend.delete([key(900)]) == [True]
    assert store(backend, range(200, 210), 65536) == [True] * 10
    check_consistency(backend)
    backend.close()


def test_a_full_store_with_a_capacity_makes_room_instead(tmp_path: Path) -> None:
    backend = opened(
        tmp_path, map_size=MIB, max_size=4 * MIB, capacity=100 * MIB, durability="async"
    )
    for start in range(0, 400, 8):
        assert store(backend, range(start, start + 8), 65536) == [True] * 8
        assert found(backend, range(start, start + 8), 65536) == [True] * 8
    assert file_bytes(tmp_path) <= 4 * MIB
    check_consistency(backend)
    backend.close()


def test_a_map_never_shrinks(tmp_path: Path) -> None:
    big = opened(tmp_path, map_size=64 * MIB)
    store(big, range(3))
    big.environment.grow(64 * MIB, -(128 * MIB))
    size = big.environment.map_bytes
    assert size >= 64 * MIB
    big.environment._adopt_map()
    assert big.environment.map_bytes >= size
    big.close()
    with Child(
        """
        backend = opened(sys.argv[1], map_size=1 << 20, durability="async")
        for start in range(0, 320, 32):
            assert store(backend, range(start, start + 32), 65536) == [True] * 32
        print(backend.environment.map_bytes)
        backend.close()
        """,
        tmp_path,
    ) as child:
        assert int(child.end()) >= 20 * MIB
    again = opened(tmp_path, map_size=MIB)
    assert again.environment.map_bytes >= 20 * MIB
    assert found(again, range(320), 65536) == [True] * 320
    again.close()


def test_several_processes_that_grow_the_map_at_once_disturb_neither_each_other_nor_readers(
    tmp_path: Path,
) -> None:
    opened(tmp_path, **SMALL).close()
    writers = [
        Child(
            """
            first = int(sys.argv[2])
            backend = opened(sys.argv[1], map_size=1 << 20, durability="async")
            print("ready", flush=True)
            sys.stdin.readline()
            for start in range(first, first + 160, 8):
                assert store(backend, range(start, start + 8), 65536) == [True] * 8
                assert found(backend, range(start, start + 8), 65536) == [True] * 8
            backend.close()
            """,
            tmp_path,
            first,
        )
        for first in (0, 1000, 2000)
    ]
    readers = [
        Child(
            """
            import select
            backend = opened(sys.argv[1], map_size=1 << 20, durability="async")
            print("ready", flush=True)
            sys.stdin.readline()
            hits = rounds = 0
            while not select.select([sys.stdin], [], [], 0)[0]:
                for first in (0, 1000, 2000):
                    hits += sum(found(backend, range(first, first + 160), 65536))
                rounds += 1
            backend.close()
            print(rounds, hits)
            """,
            tmp_path,
        )
        for _ in range(2)
    ]
    for child in writers + readers:
        assert child.line() == "ready"
    for child in writers + readers:
        child.tell()
    for writer in writers:
        with writer:
            assert writer.end() == ""
    for reader in readers:
        with reader:
            reader.tell()
            rounds, hits = map(int, reader.end().split())
            assert rounds > 0
            assert hits > 0
    backend = opened(tmp_path, **SMALL)
    for first in (0, 1000, 2000):
        assert found(backend, range(first, first + 160), 65536) == [True] * 160
    assert check_consistency(backend) == 480
    backend.close()


def test_a_process_takes_over_the_size_that_another_gave_the_map(tmp_path: Path) -> None:
    backend = opened(tmp_path, **SMALL)
    store(backend, range(2))
    with Child(
        """
        backend = opened(sys.argv[1], map_size=1 << 20, durability="async")
        assert store(backend, range(100, 200), 65536) == [True] * 100
        backend.close()
        """,
        tmp_path,
    ) as child:
        child.end()
    assert backend.environment.map_bytes == MIB
    assert found(backend, range(100, 200), 65536) == [True] * 100
    assert backend.environment.map_bytes >= 6 * MIB
    assert store(backend, [3]) == [True]
    backend.close()


NO_ROOM = """
import resource
keys, given = [key(i) for i in range(100, 900)], pages(range(100, 900), 65536)
backend = opened(sys.argv[1], map_size=1 << 20, durability="async")
assert store(backend, range(4), 65536) == [True] * 4
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize("found_out", ["before", "by LMDB"])
def test_a_growth_that_the_system_refuses_leaves_the_store_readable(
    tmp_path: Path, found_out: str
) -> None:
    output = Child(
        NO_ROOM
        + """
from hicache_storage.backends.lmdb import environment
if sys.argv[2] == "by LMDB":
    environment._addressable = lambda size: True
answers = []
for start in range(0, 800, 16):
    answers += backend.batch_set(keys[start : start + 16], given[start : start + 16])
    assert found(backend, range(1), 65536) == [True]
stored = answers.count(True)
assert 0 < stored < len(answers), stored
assert answers == [True] * stored + [False] * (len(answers) - stored)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert found(backend, range(100, 900), 65536) == answers
assert store(backend, range(100, 900), 65536) == [True] * 800  # with room, all is well again
check_consistency(backend)
backend.close()
print("good")
""",
        tmp_path,
        found_out,
    ).end()
    assert output.endswith("good\n")


def test_no_growth_goes_beyond_what_a_process_can_address(tmp_path: Path) -> None:
    backend = opened(tmp_path, **SMALL)
    store(backend, range(3))
    present = backend.environment.map_bytes
    for more in (1 << 46, 1 << 50, 1 << 62):
        backend.environment.grow(backend.environment.map_bytes, more)
        assert present <= backend.environment.map_bytes <= 1 << 46
        assert found(backend, range(3)) == [True] * 3
    backend.close()


def test_a_transaction_waits_while_the_map_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB forbids a transaction of this process while the map is exchanged."""
    backend = opened(tmp_path, **SMALL)
    store(backend, range(2))
    environment = backend.environment
    inside: list[int] = []
    resize = Environment._resize

    def watched(self: Environment, map_bytes: int) -> bool:
        inside.append(self._gate._inside)
        return resize(self, map_bytes)

    monkeypatch.setattr(Environment, "_resize", watched)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            found(backend, range(2))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(20):
        assert environment.grow(environment.map_bytes, 4096)
    stop.set()
    for reader in readers:
        reader.join(30)
    assert inside == [0] * 20
    backend.close()


def test_growing_a_map_that_someone_grew_meanwhile_is_done_already(tmp_path: Path) -> None:
    backend = opened(tmp_path, **SMALL)
    assert backend.environment.grow(MIB, 4096)
    size = backend.environment.map_bytes
    assert backend.environment.grow(MIB, 1 << 40)
    assert backend.environment.map_bytes == size
    backend.close()


def test_the_room_for_a_new_map_is_looked_for_before_the_old_one_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, **SMALL)
    store(backend, range(2))
    monkeypatch.setattr(environment_module, "_addressable", lambda size: False)
    handle = backend.environment.handle
    assert not backend.environment.grow(MIB, 1 << 30)
    assert backend.environment.handle is handle
    assert isinstance(handle, lmdb.Environment)
    assert found(backend, range(2)) == [True] * 2
    backend.close()


@pytest.mark.parametrize("step", ["open", "trees"])
@pytest.mark.parametrize("times", [1, 5, 1000])
def test_an_environment_that_others_enlarge_while_it_is_opened_is_opened_again(
    tmp_path: Path, step: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tmp_path)
    assert store(first, [1]) == [True]
    first.close()
    name = {"open": "_open", "trees": "_trees"}[step]
    usual = getattr(opening, name)
    handles, left = [], [times]

    def meets_growth(*arguments: Any) -> Any:
        handles.extend(one for one in arguments if isinstance(one, lmdb.Environment))
        if left[0]:
            left[0] -= 1
            raise lmdb.MapResizedError("mdb_txn_begin", -30785)
        return usual(*arguments)

    monkeypatch.setattr(opening, name, meets_growth)
    if times == 1000:
        with pytest.raises(BackendError, match="mdb_txn_begin"):
            opened(tmp_path)
    else:
        again = opened(tmp_path)
        assert found(again, [1]) == [True]
        again.close()
    # What was opened in vain is closed: LMDB must not be opened twice in a process.
    for handle in handles:
        with pytest.raises(lmdb.Error):
            handle.info()
