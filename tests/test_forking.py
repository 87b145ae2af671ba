"""A fork while another thread holds a lock: the child goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from recording import RecordingBackend

from hicache_storage import BackendError, Namespace, PairedStore, Store, hookimpl, open_store
from hicache_storage.calling import Caller
from hicache_storage.edge import StorageEdge
from hicache_storage.failures import FailureLog
from hicache_storage.middleware.breaker import Breaker, BreakerConfig
from hicache_storage.middleware.limit import Limit, LimitConfig

WAIT_S = 30.0
KEY = "0f" * 16 + "/" + "0a" * 32


def runs_in_child(work: Callable[[], None]) -> bool:
    """Whether `work` comes to a good end in a forked child."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    end_s = time.monotonic() + WAIT_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.01)
    return ended[1] == 0


@pytest.mark.parametrize("place", ["store", "failures", "edge", "middleware"])
def test_a_lock_that_a_thread_holds_while_the_process_forks_is_free_in_the_child(
    target_namespace: Namespace, hashes: Callable[[int], list[str]], place: str
) -> None:
    if place == "middleware":
        store = open_store("memory://?limit=on&deadline=on&retry=on&breaker=on&existence=on")
        backend: Any = store._caller.backend
        owners = []
        while backend is not None:
            owners += [backend] if hasattr(backend, "_lock") else []
            backend = getattr(getattr(backend, "inner", None), "backend", None)
        assert owners
    else:
        store = Store(RecordingBackend(), name="memory")
        store.open()
    edge = StorageEdge(PairedStore(store, target_namespace))
    log = FailureLog("test")
    held = {"store": [store], "failures": [log, store.failures], "edge": [edge, edge.guard]}
    locks = [owner._lock for owner in (owners if place == "middleware" else held[place])]
    locked, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        locked.set()
        let_go.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(WAIT_S)

    def work() -> None:
        keys = hashes(2)
        assert edge.batch_set(keys, [bytes(512)] * 2).target == [True, True]
        assert edge.batch_get(keys, [bytearray(512), bytearray(512)]).target == [True, True]
        assert edge.exists(keys).usable == 2
        log.note("kind", "cause")

    try:
        assert runs_in_child(work)
    finally:
        let_go.set()
        thread.join(WAIT_S)
    store.close()


class Held(RecordingBackend):
    """Lookups stay inside while `free` isn't set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.free = threading.Event(), threading.Event()

    @hookimpl
    def exists(self, keys: list[str]) -> int:
        self.entered.set()
        assert self.free.wait(WAIT_S)
        return len(keys)


def child_works_while_a_call_is_inside(backend: Held, caller: Caller) -> bool:
    """Whether a lookup succeeds in a child that is forked while another thread is in one."""
    thread = threading.Thread(target=caller.exists, args=(["a"], None))
    thread.start()
    assert backend.entered.wait(WAIT_S)

    def work() -> None:
        backend.free = threading.Event()
        backend.free.set()
        assert caller.exists(["a"], None) == 1

    try:
        return runs_in_child(work)
    finally:
        backend.free.set()
        thread.join(WAIT_S)


def test_a_turn_that_a_thread_has_while_the_process_forks_is_free_in_the_child() -> None:
    backend = Held()
    limit = Limit(Caller(backend, name="memory"), LimitConfig(calls=1, wait_s=0.01))
    assert child_works_while_a_call_is_inside(backend, Caller(limit, name="memory"))


def test_a_fork_from_within_a_call_leaves_the_child_no_more_turns_than_allowed() -> None:
    backend = Held()
    backend.free.set()
    limit = Limit(Caller(backend, name="memory"), LimitConfig(calls=1, wait_s=0.01))

    child = 1

    def works() -> None:
        nonlocal child
        child = os.fork()

    limit.guard("exists", works)
    if child == 0:
        os._exit(0 if limit._turns.qsize() == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_probe_that_a_thread_makes_while_the_process_forks_is_made_anew_in_the_child() -> None:
    backend = Held()
    breaker = Breaker(Caller(backend, name="memory"), BreakerConfig(failures=1, cooldown_s=0.0))
    caller = Caller(breaker, name="memory")
    backend.fail["batch_get"] = OSError("down")
    with pytest.raises(BackendError, match="down"):
        caller.batch_get([KEY], [(memoryview(bytearray(1)),)], None)
    assert child_works_while_a_call_is_inside(backend, caller)
    assert breaker.state == "closed"
