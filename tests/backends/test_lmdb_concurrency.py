"""Threads and processes read and write at once; the gate lets many through, or one alone."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from backends.lmdb_rig import Child, check_consistency, found, opened, store

from hicache_storage.backends.lmdb.gate import Gate

KIB = 1 << 10


def test_a_gate_lets_many_through_or_one_alone() -> None:
    gate = Gate()
    state = {"inside": 0, "alone": 0, "most": 0}
    failures: list[str] = []
    lock, done = threading.Lock(), threading.Event()

    def pass_through() -> None:
        while not done.is_set():
            gate.enter()
            with lock:
                state["inside"] += 1
                state["most"] = max(state["most"], state["inside"])
                if state["alone"]:
                    failures.append("inside while somebody is alone")
            with lock:
                state["inside"] -= 1
            gate.leave()

    def be_alone() -> None:
        for _ in range(50):
            with gate.alone():
                state["alone"] += 1
                time.sleep(0.0005)
                if state["inside"] or state["alone"] != 1:
                    failures.append("not alone")
                state["alone"] -= 1

    def be_sole() -> None:
        for _ in range(50):
            gate.enter()
            with gate.sole():
                time.sleep(0.0005)
                if state["inside"] or state["alone"]:
                    failures.append("not the only one")
            gate.leave()

    threads = [threading.Thread(target=pass_through) for _ in range(4)]
    threads += [threading.Thread(target=be_alone) for _ in range(2)]
    threads += [threading.Thread(target=be_sole)]
    for thread in threads:
        thread.start()
    for thread in threads[4:]:
        thread.join(60)
    done.set()
    for thread in threads[:4]:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert gate.idle


def test_waiting_to_be_alone_ends_in_time_and_leaves_the_gate_open() -> None:
    gate = Gate()
    gate.enter()
    assert gate.shut(0.05) is False
    gate.enter()
    gate.leave()
    gate.leave()
    assert gate.shut(0.05) is True
    assert gate.shut(0.05) is False
    gate.open()
    assert gate.idle


def test_a_writer_gives_up_only_once_no_other_thread_is_in_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others read all the time the client would never let it."""
    backend = opened(tmp_path, durability="async")
    store(backend, range(4), 256 * KIB)
    environment = backend.environment
    inside: list[int] = []

    class Transaction:
        def __init__(self, transaction: Any) -> None:
            self._transaction = transaction

        def abort(self) -> None:
            inside.append(environment._gate._inside)
            self._transaction.abort()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transaction, name)

    begin = environment._begin
    monkeypatch.setattr(
        environment,
        "_begin",
        lambda write: Transaction(begin(write=True)) if write else begin(write=False),
    )
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            found(backend, range(4), 256 * KIB)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(10):
        with pytest.raises(RuntimeError, match="on purpose"):
            write_and_fail(backend)
    stop.set()
    for reader in readers:
        reader.join(30)
    assert inside == [1] * 10
    with environment.reading() as (txn, trees):
        assert txn.get(b"x", db=trees.totals) is None
    backend.close()


def write_and_fail(backend: Any) -> None:
    with backend.environment.writing() as (txn, trees):
        txn.put(b"x", b"y", db=trees.totals)
        raise RuntimeError("on purpose")


def test_two_threads_write_at_once_and_neither_is_refused(tmp_path: Path) -> None:
    backend = opened(tmp_path, durability="async")
    failures: list[BaseException] = []

    def write(first: int) -> None:
        try:
            for start in range(first, first + 200, 5):
                assert store(backend, range(start, start + 5)) == [True] * 5
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert check_consistency(backend) == 600
    backend.close()


def test_processes_and_threads_write_and_read_at_once(tmp_path: Path) -> None:
    children = [
        Child(
            """
            import threading
            backend = opened(sys.argv[1], durability="async", map_size=1 << 20)
            first = int(sys.argv[2])
            failures = []
            def work(base):
                try:
                    for start in range(base, base + 60, 4):
                        assert store(backend, range(start, start + 4), 30_000) == [True] * 4
                        assert found(backend, range(start, start + 4), 30_000) == [True] * 4
                        if start % 20 == 0:
                            assert backend.delete([key(start)]) == [True]
                except BaseException as error:
                    failures.append(repr(error))
            threads = [threading.Thread(target=work, args=(first + i * 100,)) for i in range(3)]
            for thread in threads: thread.start()
            for thread in threads: thread.join(60)
            assert not failures, failures
            backend.close()
            """,
            tmp_path,
            first,
        )
        for first in (0, 1000)
    ]
    for child in children:
        with child:
            assert child.end() == ""
    backend = opened(tmp_path)
    assert check_consistency(backend) == 2 * 3 * 57
    backend.close()
