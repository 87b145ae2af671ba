"""The stress program: it finds what it is for, and finds nothing on the built-in backends."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hicache_storage import PageSpans, Store, hookimpl
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig

STRESS = Path(__file__).parents[2] / "benchmarks" / "stress.py"
CALLS = 400


@pytest.fixture
def stress(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("stress", STRESS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stress", module)
    spec.loader.exec_module(module)
    return module


class LosesPages(MemoryBackend):
    """Forgets one page in eight that it has acknowledged."""

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        super().batch_set(keys, pages)
        for key in keys[7::8]:
            self._drop(key)
        return [True] * len(keys)


class KeepsTheOldPage(MemoryBackend):
    """Takes a page only once."""

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        new = [i for i, key in enumerate(keys) if key not in self._pages]
        super().batch_set([keys[i] for i in new], [pages[i] for i in new])
        return [True] * len(keys)


class DeletesNothing(MemoryBackend):
    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        return [True] * len(keys)


class Mixes(MemoryBackend):
    """Gives the payload of one page under the header of another, checksums and all."""

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        hits = super().batch_get(keys, buffers)
        for spans, hit in zip(buffers, hits, strict=True):
            if hit:
                spans[-1][-1] ^= 1
        return hits


class Overflows(MemoryBackend):
    """Writes behind the end of the last buffer, where Python lets it."""

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        whole = buffers[-1][-1].obj
        assert isinstance(whole, bytearray)
        whole[-1] ^= 1
        return super().batch_get(keys, buffers)


def tally(stress: ModuleType, backend: MemoryBackend, *, evicts: bool = False) -> tuple[int, int]:
    """What one worker counts as wrong, and what its store turned into misses."""
    store = Store(backend)
    store.open()
    worker = stress.Worker(store, 0, 0, 32, evicts)
    for i in range(CALLS):
        verb = (worker.set, worker.get, worker.look_up, worker.set, worker.delete)[i % 5]
        numbers = worker.random.sample(worker.own, worker.random.randint(1, 16))
        verb(i % 2, numbers, True)
    return worker.tally.counts["wrong"], store.counts.corrupt_pages


@pytest.mark.parametrize("cls", [LosesPages, KeepsTheOldPage, DeletesNothing, Overflows])
def test_a_backend_that_is_wrong_is_found(stress: ModuleType, cls: type[MemoryBackend]) -> None:
    wrong, _ = tally(stress, cls(MemoryConfig()))
    assert wrong > 0


def test_pages_that_the_store_itself_turns_into_misses_are_found_too(stress: ModuleType) -> None:
    wrong, corrupt = tally(stress, Mixes(MemoryConfig()), evicts=True)
    assert corrupt > 0
    assert wrong == 0


def test_a_backend_that_is_right_is_not_accused(stress: ModuleType) -> None:
    assert tally(stress, MemoryBackend(MemoryConfig())) == (0, 0)
    small = MemoryBackend(MemoryConfig(capacity=1 << 20))
    assert tally(stress, small, evicts=True) == (0, 0)


def test_every_byte_of_a_page_depends_on_its_write_and_its_place(stress: ModuleType) -> None:
    first, second = (stress.page(stress.STAMP.pack(1, 0, 0, i), 4096) for i in (1, 2))
    assert first != second
    words = [first[i : i + 16] for i in range(0, 4096, 16)]
    assert len({*words}) == len(words)


def options(**given: object) -> argparse.Namespace:
    made = {"url": "file:///x", "processes": 1, "threads": 1, "seconds": 1.0, "slack": 0, **given}
    return argparse.Namespace(**made)


def verdict(stress: ModuleType, *, corrupt: int = 0, unexpected: object = (), **seen: int) -> bool:
    found = stress.Tally()
    found.counts.update(set=9, hit=9, deleted=9)
    watched = stress.Watch(**{"capacity": 100, "highest": 100, "left": 100, **seen})
    return bool(stress.verdict(options(), watched, [([found], corrupt, unexpected)])["good"])


@pytest.mark.parametrize(
    "seen",
    [{"highest": 101}, {"left": 101}, {"corrupt": 1}, {"dead": ["one"]}, {"unexpected": ["one"]}],
    ids=str,
)
def test_a_run_is_good_only_if_nothing_at_all_is_wrong(
    stress: ModuleType, seen: dict[str, int]
) -> None:
    assert verdict(stress)
    assert not verdict(stress, **seen)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_a_store_under_stress_gives_no_wrong_byte_and_keeps_its_capacity(
    tmp_path: Path, scheme: str
) -> None:
    url = f"{scheme}://{tmp_path}/pages?capacity=16MiB"
    done = subprocess.run(
        [
            sys.executable, str(STRESS), url, "--processes", "2", "--threads", "4",
            "--seconds", "5", "--working-set", "64MiB",
        ],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| 2 of 2 |" in done.stdout
