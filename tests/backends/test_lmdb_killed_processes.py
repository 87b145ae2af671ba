"""Killed readers give their slots back and pin nothing; a killed writer leaves a sound file."""

from __future__ import annotations

import random
from pathlib import Path

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

from hicache_storage import BackendUnavailable
from hicache_storage.backends.lmdb import environment as environment_module


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
