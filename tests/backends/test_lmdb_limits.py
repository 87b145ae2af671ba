"""Keys and pages up to LMDB's limits are stored and waste nothing; one beyond them fails alone."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
from backends.lmdb_rig import DIGEST, check_consistency, extent, found, key, opened, page, store

from hicache_storage import Namespace, open_store
from hicache_storage.backends.lmdb.records import MOST_PAGE_BYTES

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("wrong", [f"{DIGEST}/{'a' * 600}", "", "k" * 512])
def test_a_key_that_lmdb_can_not_take_fails_alone(tmp_path: Path, wrong: str) -> None:
    backend = opened(tmp_path)
    keys = [key(number) for number in range(10)]
    keys[5] = wrong
    answers = backend.batch_set(keys, [page(number, 512) for number in range(10)])
    assert answers == [True] * 5 + [False] + [True] * 4
    assert found(backend, [0, 4, 6, 9], 512) == [True] * 4
    assert backend.usage().pages == 9
    assert backend.failures.counts["key"] == 1
    check_consistency(backend)
    backend.close()


def test_the_longest_stored_key_fits_and_comes_back_as_it_was(tmp_path: Path) -> None:
    longest = f"{DIGEST}/{'t' * 32}:{'a' * 128}"
    assert len(longest) == 194
    backend = opened(tmp_path)
    assert backend.environment.longest_key >= 194
    assert backend.batch_set([longest, key(1)], [page(1, 600), page(2, 600)]) == [True, True]
    assert {entry.key for entry in backend.scan("")} == {longest, key(1)}
    assert [entry.key for entry in backend.scan(longest[:190])] == [longest]
    backend.close()


def test_long_model_names_and_tenants_do_not_make_keys_longer(tmp_path: Path) -> None:
    namespace = Namespace(
        model="a/very/long/" + "name" * 30,
        pool="opaque",
        dtype="uint8",
        page_size=1,
        page_bytes=100,
        layers=1,
        heads=1,
        head_dim=1,
        v_head_dim=0,
        order="opaque",
        tenant="t" * 64,
    )
    with open_store(f"lmdb://{tmp_path}") as pages:
        name = f"d:{'f' * 64}"
        assert pages.batch_set(namespace, [name], [bytes(100)]) == [True]
        assert all(len(entry.key) <= 194 for entry in pages.scan())
        assert pages.namespaces() == {namespace.digest: namespace}


def test_a_page_beyond_two_gib_is_refused_and_its_neighbours_are_stored(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    with mmap.mmap(-1, MOST_PAGE_BYTES + 4096) as memory:
        huge = memoryview(memory)
        large = (memoryview(bytes(64)), huge)
        answers = backend.batch_set([key(0), key(1), key(2)], [page(0, 99), large, page(2, 99)])
        buffers: list[Any] = [(memoryview(bytearray(64)), huge)]
        assert backend.batch_get([key(1)], buffers) == [False]
        del large, buffers
        huge.release()
    assert answers == [True, False, True]
    assert found(backend, [0, 2], 99) == [True, True]
    backend.close()


@pytest.mark.parametrize("size", [16 * KIB, 64 * KIB, MIB, 3 * MIB])
def test_a_page_of_a_power_of_two_wastes_next_to_nothing(tmp_path: Path, size: int) -> None:
    backend = opened(tmp_path, durability="async")
    count = 16 * MIB // size
    store(backend, range(count), size)
    backend.close()
    used = extent(tmp_path).used_pages * 4096
    assert used < count * size * 1.03 + 64 * KIB
