"""CallMetrics counts what a backend was asked and what came of it, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from recording import RecordingBackend

from hicache_storage import BackendError, Namespace, Store, open_store
from hicache_storage.middleware.metrics import CallMetrics, StoreCollector
from hicache_storage.page import HEADER_BYTES

Hashes = Callable[[int], list[str]]


def test_calls_keys_pages_bytes_and_errors_are_counted(
    target_namespace: Namespace, hashes: Hashes
) -> None:
    backend, metrics = RecordingBackend(), CallMetrics()
    store = Store(backend, name="memory", wrappers=[metrics])
    store.batch_set(target_namespace, hashes(2), [bytes(512)] * 2)
    assert store.batch_get(target_namespace, hashes(3), [bytearray(512) for _ in range(3)]) == [
        True,
        True,
        False,
    ]
    assert store.exists(target_namespace, hashes(3)) == 2
    backend.fail["exists"] = OSError(5, "I/O error")
    with pytest.raises(BackendError):
        store.exists(target_namespace, hashes(1))
    counts = metrics.snapshot()
    read, found = counts["batch_get"], counts["exists"]
    assert (read.calls, read.keys, read.pages, read.errors) == (1, 3, 2, 0)
    assert read.transferred_bytes == 2 * (512 + HEADER_BYTES)
    assert 0 < read.slowest_s <= read.seconds
    assert (found.calls, found.keys, found.pages, found.errors) == (2, 4, 2, 1)
    assert counts["batch_set"].pages == 3, "two pages and the namespace's record"
    assert "delete" not in counts


def test_the_calls_of_a_batch_that_is_spread_add_up(
    tmp_path: Path, target_namespace: Namespace, hashes: Hashes
) -> None:
    metrics, keys = CallMetrics(), hashes(64)
    with open_store(f"file://{tmp_path}?io_threads=4", wrappers=[metrics]) as store:
        assert store.batch_set(target_namespace, keys[1:], [bytes(512)] * 63) == [True] * 63
        hits = store.batch_get(target_namespace, keys, [bytearray(512) for _ in keys])
        assert hits == [False] + [True] * 63
    counts = metrics.snapshot()
    written, read = counts["batch_set"], counts["batch_get"]
    assert (written.pages, written.keys, written.errors) == (64, 64, 0), "and the record"
    assert (read.pages, read.keys, read.errors) == (63, 64, 0)
    assert read.transferred_bytes == 63 * (512 + HEADER_BYTES)
    assert read.calls == 4


def test_a_snapshot_does_not_change_any_more(target_namespace: Namespace, hashes: Hashes) -> None:
    metrics = CallMetrics()
    store = Store(RecordingBackend(), wrappers=[metrics])
    store.exists(target_namespace, hashes(1))
    before = metrics.snapshot()
    store.exists(target_namespace, hashes(1))
    assert (before["exists"].calls, metrics.snapshot()["exists"].calls) == (1, 2)


def test_prometheus_sees_the_same_counts(target_namespace: Namespace, hashes: Hashes) -> None:
    metrics = CallMetrics()
    store = Store(RecordingBackend(), name="memory", wrappers=[metrics])
    store.batch_set(target_namespace, hashes(2), [bytes(512)] * 2)
    store.batch_get(target_namespace, hashes(3), [bytearray(512) for _ in range(3)])
    registry = CollectorRegistry()
    registry.register(StoreCollector(store, metrics))
    value = registry.get_sample_value
    labels = {"store": "memory", "hook": "batch_get"}
    assert value("hicache_storage_call_keys_total", labels) == 3
    assert value("hicache_storage_pages_total", {"store": "memory", "outcome": "hit"}) == 2
    assert value("hicache_storage_pages_total", {"store": "memory", "outcome": "missed"}) == 1
