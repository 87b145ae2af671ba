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

from hicache_storage import Namespace, PairedStore, Store, open_store
from hicache_storage.edge import StorageEdge
from hicache_storage.failures import FailureLog

WAIT_S = 30.0


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
