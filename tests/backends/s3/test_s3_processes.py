"""Fork: a child has connections of its own, and the parent's are left alone."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from backends.s3.misbehaving_server import MisbehavingServer
from backends.s3.rig import Opened

Open = Callable[..., Opened]

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked child; the child's process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended_well(processes: list[int]) -> bool:
    return all(os.waitpid(process, 0)[1] == 0 for process in processes)


def test_children_read_the_right_pages_and_the_parent_goes_on(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    store.fill(100)
    assert store.get([0, 1]) == [True, True]
    parents = {seen.connection for seen in server.seen}

    def child(first: int) -> Callable[[], None]:
        def work() -> None:
            for i in range(first, 100, 4):
                assert store.get([i]) == [True]
            assert store.get(list(range(first, 100, 4))) == [True] * 25
            store.store.close()

        return work

    server.forget()
    children = [in_child(child(first)) for first in range(4)]
    for _ in range(5):
        assert store.get(list(range(100))) == [True] * 100
    assert ended_well(children)
    assert store.get(list(range(100))) == [True] * 100
    assert store.backend.counts.retries == 0
    # Nothing came over a connection that two processes hold.
    assert len({seen.connection for seen in server.seen} - parents) >= 4
    assert server.connects < 4 * 40 + 40


def test_a_fork_while_other_threads_are_in_calls_is_safe(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server, concurrency=8)
    store.fill(50)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            assert store.get(list(range(50))) == [True] * 50

    def work() -> None:
        assert store.get(list(range(10))) == [True] * 10

    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(read) for _ in range(3)]
        for _ in range(5):
            assert ended_well([in_child(work)])
        stop.set()
        for done in reads:
            done.result(60)


def test_a_closed_store_stays_closed_in_a_child(server: MisbehavingServer, opened: Open) -> None:
    from hicache_storage import StoreClosed

    store = opened(server)
    store.store.close()

    def work() -> None:
        with pytest.raises(StoreClosed):
            store.backend.exists(keys=["0" * 32 + "/" + "0" * 64])

    assert ended_well([in_child(work)])
