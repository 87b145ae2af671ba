"""The ledger never says less than there is, whatever meets a recount; at rest it is exact."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from backends.file_rig import Child, opened, store
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.backends.file import backend as file_backend
from hicache_storage.backends.file import ledger as ledger_module
from hicache_storage.backends.file.ledger import Amount, Ledger, Mark

CAPACITY = 120
KEYS = 3


class Disk:
    """Pages that are really there, beside what the ledger says of them.

    Each actor is a generator that does one step at a time, so that a schedule can run them in
    any order.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.pages: dict[int, int] = {}
        self.in_flight: list[tuple[Mark, int]] = []
        """Of pages that are published and not settled."""

    def writer(self, random: Random) -> Iterator[None]:
        while True:
            key, size = random.randrange(KEYS), random.randrange(1, 30)
            room = self.ledger.reserve(size, size, 1, CAPACITY)
            yield
            if room is None:
                continue
            added = Amount()
            if random.random() < 0.9:  # else the write failed
                old = self.pages.get(key)
                self.pages[key] = size
                added = Amount(size - (old or 0), int(old is None))
                self.in_flight.append((room.mark, size))
                yield
            if random.random() < 0.9:  # else the writer died
                self.ledger.settle(room, added)
                if (room.mark, size) in self.in_flight:
                    self.in_flight.remove((room.mark, size))
                yield

    def remover(self, random: Random) -> Iterator[None]:
        while True:
            mark = self.ledger.read().mark
            yield
            size = self.pages.pop(random.randrange(KEYS), None)
            yield
            if size is not None and random.random() < 0.7:  # else removed by hand
                self.ledger.release(Amount(size, 1), mark)
                yield

    def recounter(self, random: Random) -> Iterator[None]:
        while True:
            number = self.ledger.begin_recount()
            yield
            found = Amount()
            for key in random.sample(range(KEYS), KEYS):
                if key in self.pages:
                    found = found.plus(Amount(self.pages[key], 1))
                yield
            if random.random() < 0.9:  # else the walk was cut short
                self.ledger.end_recount(number, found)
                yield

    def check(self) -> None:
        """That the ledger says no less than there is, but for what is in flight for longer than
        KEEP_S and two recounts."""
        balance = self.ledger.read()
        late = (
            []
            if ledger_module.KEEP_S
            else [size for mark, size in self.in_flight if mark.begun < balance.counted_from]
        )
        assert balance.total.stored_bytes + sum(late) >= sum(self.pages.values())
        assert balance.total.pages + len(late) >= len(self.pages)
        assert sum(self.pages.values()) <= CAPACITY + sum(late)


@settings(max_examples=400, deadline=None, database=None)
@given(
    schedule=st.lists(st.integers(0, 3), min_size=20, max_size=60),
    seed=st.integers(0, 1 << 32),
    keep_s=st.sampled_from([0.0, 60.0]),
)
def test_it_says_no_less_than_there_is_whatever_meets_a_recount(
    schedule: list[int], seed: int, keep_s: float
) -> None:
    """Writers that settle, fail or die, removals with and without notice, walks that end or not.
    Once all is quiet, and the reservations of the dead are too old, recounts make it exact."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "KEEP_S", keep_s)
        ledger = Ledger(f"{folder}/ledger")
        disk = Disk(ledger)
        actors = [disk.writer(random), disk.writer(random), disk.recounter(random)]
        actors.append(disk.remover(random))
        for turn in schedule:
            next(actors[turn])
            disk.check()
        patch.setattr(ledger_module, "KEEP_S", 0.0)
        for _ in range(3):
            number = ledger.begin_recount()
            ledger.end_recount(number, Amount(sum(disk.pages.values()), len(disk.pages)))
        assert ledger.read().total == Amount(sum(disk.pages.values()), len(disk.pages))
        ledger.close()


def test_processes_agree_on_every_byte(tmp_path: Path) -> None:
    source = """
    from hicache_storage.backends.file.ledger import *
    ledger = Ledger(sys.argv[1])
    for turn in range(2000):
        room = ledger.reserve(100, 100, 1, None)
        ledger.settle(room, Amount(7, 1))
        if turn % 2:
            ledger.release(Amount(7, 1), ledger.read().mark)
    """
    path = str(tmp_path / "ledger")
    children = [Child(source, path) for _ in range(4)]
    for child in children:
        child.end()
    assert Ledger(path).read().total == Amount(4 * 1000 * 7, 4000)


def test_a_ledger_of_another_start_of_the_machine_counts_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut it may be older than the pages."""
    ledger = Ledger(str(tmp_path / "ledger"))
    number = ledger.begin_recount()
    ledger.end_recount(number, Amount(500, 5))
    assert Ledger(str(tmp_path / "ledger")).read().mark.ended == 1
    monkeypatch.setattr(ledger_module, "_boot_id", lambda: b"another start..." * 1)
    later = Ledger(str(tmp_path / "ledger"))
    assert (later.read().mark, later.read().total) == (Mark(), Amount())


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 200])
def test_a_damaged_ledger_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ledger").write_bytes(content)
    ledger = Ledger(str(tmp_path / "ledger"))
    assert ledger.read().mark.ended == 0
    assert ledger.reserve(10, 10, 1, 10) is not None
    assert ledger.reserve(1, 1, 1, 10) is None


def test_a_ledger_that_was_replaced_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first, second = Ledger(str(path)), Ledger(str(path))
    first.reserve(10, 10, 1, None)
    os.unlink(path)
    assert second.read().total == Amount()
    first.reserve(20, 20, 1, None)
    second.reserve(30, 30, 1, None)
    assert first.read().total == second.read().total == Amount(50, 2)


def test_a_recount_that_was_cut_short_loses_no_reservation(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "ledger"))
    rooms = []
    for _ in range(3):  # two of the recounts never end
        rooms.append(ledger.reserve(10, 10, 1, None))
        number = ledger.begin_recount()
    ledger.end_recount(number, Amount())
    assert ledger.read().total == Amount(30, 3)
    for room in rooms:
        assert room is not None
        ledger.settle(room, Amount(10, 1))
    assert ledger.read().total == Amount(30, 3)


def test_usage_leaves_out_what_a_dead_writer_had_reserved(tmp_path: Path) -> None:
    """Before and after clearing, and it is exact again for what is written then."""
    backend = opened(tmp_path, capacity=1 << 20)
    assert store(backend, range(3)) == [True] * 3
    (path,) = [path for path in tmp_path.rglob("ledger") if path.is_file()]
    dead = Ledger(str(path))
    assert dead.reserve(6000, 600, 10, 1 << 20) is not None
    dead.close()
    held = backend.usage()
    assert held.pages == 3
    assert held.stored_bytes == sum(page.stored_bytes for page in backend.scan(""))
    backend.clear()
    assert backend.usage().pages == 0
    assert store(backend, range(2)) == [True] * 2
    assert backend.usage().pages == 2
    backend.close()


def test_usage_counts_no_room_twice_that_changes_hands_during_the_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is evicted once the walk has met it, and the one that takes its room ahead."""
    backend = opened(tmp_path, capacity=1 << 20)
    assert store(backend, range(3)) == [True] * 3
    (path,) = [path for path in tmp_path.rglob("ledger") if path.is_file()]
    writer = Ledger(str(path))
    assert writer.reserve(600, 600, 1, 1 << 20) is not None
    there = list(backend.scan(""))
    monkeypatch.setattr(file_backend, "pages", lambda *_: there * 2)
    held = backend.usage()
    assert held.pages == 4
    assert held.stored_bytes == sum(page.stored_bytes for page in there) + 600
    writer.close()
    backend.close()
