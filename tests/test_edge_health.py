"""Storage that fails for every page is said loudly once, and shown as unhealthy."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from hicache_storage import CapacityExceeded, ContractViolation, Namespace, PairedStore, Store
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.edge import FRUITLESS_WRITES, StorageEdge
from hicache_storage.testing.faults import Fault, FaultyBackend, NoneResult, Raise, Refuse

Hashes = Callable[[int], list[str]]


@pytest.fixture
def faulty() -> FaultyBackend:
    return FaultyBackend(MemoryBackend(MemoryConfig()))


@pytest.fixture
def edge(
    faulty: FaultyBackend, target_namespace: Namespace, draft_namespace: Namespace
) -> StorageEdge:
    return StorageEdge(PairedStore(Store(faulty, name="mem"), target_namespace, draft_namespace))


def write(edge: StorageEdge, hashes: list[str]) -> None:
    count = len(hashes)
    edge.batch_set(hashes, [bytes(512)] * count, [bytes(256)] * count)


@pytest.mark.parametrize(
    "fault",
    [
        Raise(RuntimeError("kernel not supported")),
        Raise(CapacityExceeded("full", backend="x", operation="batch_set")),
        Raise(ContractViolation("wrong")),
        Refuse(),
        NoneResult(),
    ],
    ids=repr,
)
def test_writes_that_never_succeed_are_one_loud_line_and_a_health_that_shows_it(
    edge: StorageEdge,
    faulty: FaultyBackend,
    hashes: Hashes,
    fault: Fault,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty.inject("batch_set", fault)
    caplog.set_level(logging.WARNING, "hicache_storage")
    for _ in range(FRUITLESS_WRITES - 1):
        write(edge, hashes(4))
    assert edge.healthy
    for _ in range(30):
        write(edge, hashes(4))
    assert not edge.healthy
    loud = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(loud) == 1
    assert f"the last {FRUITLESS_WRITES} write batches stored nothing" in loud[0].getMessage()
    faulty.heal()
    write(edge, hashes(4))
    assert edge.healthy
    assert caplog.records[-1].getMessage() == "storage 'mem': pages are stored again"
    assert edge.counts.written_pages == 4


def test_a_write_that_stores_one_page_is_no_failure(
    edge: StorageEdge, faulty: FaultyBackend, hashes: Hashes
) -> None:
    names = [f"{edge.pairs.target.digest}/{page_hash}" for page_hash in hashes(4)]
    faulty.inject("batch_set", Refuse(), keys=names[1:])
    for _ in range(3 * FRUITLESS_WRITES):
        write(edge, hashes(4))
    assert edge.healthy


def test_batches_without_pages_say_nothing_about_health(
    edge: StorageEdge, faulty: FaultyBackend, hashes: Hashes
) -> None:
    faulty.inject("batch_set", Refuse())
    for _ in range(3 * FRUITLESS_WRITES):
        write(edge, hashes(0))
    assert edge.healthy
