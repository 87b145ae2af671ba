"""Threads that read a batch of large pages from lmdb://."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from backends.lmdb_rig import opened
from backends.test_file_threads import ALL, KIB, Meeting, namespace_of

from hicache_storage import Store
from hicache_storage import store as store_module
from hicache_storage.backends.lmdb import backend as backend_module

KEYS = [f"{number:064x}" for number in range(8)]


def pages_of(size: int) -> list[bytes]:
    return [bytes([number]) * size for number in range(len(KEYS))]


def read(store: Store, size: int) -> bool:
    got = [bytearray(size) for _ in KEYS]
    return store.batch_get(namespace_of(size), KEYS, got) == [True] * len(KEYS) and got == pages_of(
        size
    )


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize(("page_bytes", "readers"), [(256 * KIB, 1), (1024 * KIB, ALL)])
def test_large_pages_are_read_and_checked_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int, readers: int, threads: int
) -> None:
    monkeypatch.setattr(backend_module, "THREADS", threads)
    with Store(opened(tmp_path), name="lmdb") as store:
        wrote: set[int] = set()
        make, check = store_module.make_header, store_module.check_page

        def making(*given: Any) -> bytes:
            wrote.add(threading.get_ident())
            return make(*given)

        monkeypatch.setattr(store_module, "make_header", making)
        assert all(store.batch_set(namespace_of(page_bytes), KEYS, pages_of(page_bytes)))
        assert wrote == {threading.get_ident()}
        meeting = Meeting(readers or threads)

        def checking(*given: Any) -> None:
            meeting.come()
            check(*given)

        monkeypatch.setattr(store_module, "check_page", checking)
        assert read(store, page_bytes)
        assert len(meeting.threads) == meeting.expected


def test_a_forked_child_reads_with_threads_of_its_own(tmp_path: Path) -> None:
    size = 1024 * KIB
    with Store(opened(tmp_path), name="lmdb") as store:
        assert all(store.batch_set(namespace_of(size), KEYS, pages_of(size)))
        assert read(store, size)
        child = os.fork()
        if child == 0:
            good = False
            try:
                good = read(store, size) and read(store, size)
            finally:
                os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert read(store, size)


def test_a_store_that_is_opened_again_has_its_threads_again(tmp_path: Path) -> None:
    size, backend = 1024 * KIB, opened(tmp_path)
    with Store(backend, name="lmdb") as store:
        assert all(store.batch_set(namespace_of(size), KEYS, pages_of(size)))
        assert read(store, size)
    backend.open()
    with Store(backend, name="lmdb") as store:
        assert read(store, size)
    assert backend.failures.counts["threads"] == 0
