"""StorageEdge: whatever storage does, an engine's thread gets a full answer and no exception."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from recording import RecordingBackend

from hicache_storage import BackendError, BackendTimeout, Namespace, PairedStore, Store
from hicache_storage.edge import StorageEdge
from hicache_storage.pairing import Pairing

Hashes = Callable[[int], list[str]]
ERRORS: list[Exception] = [
    BackendTimeout("slow", backend="memory", operation="x"),
    OSError(5, "I/O error"),
    ValueError("a bug"),
    MemoryError(),
]


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture(params=["best_effort", "required"])
def edge(
    request: pytest.FixtureRequest,
    backend: RecordingBackend,
    target_namespace: Namespace,
    draft_namespace: Namespace,
) -> StorageEdge:
    pairing: Pairing = request.param
    return StorageEdge(
        PairedStore(
            Store(backend, name="memory"), target_namespace, draft_namespace, pairing=pairing
        )
    )


def write(edge: StorageEdge, hashes: list[str]) -> Any:
    count = len(hashes)
    return edge.batch_set(hashes, [bytes(512)] * count, [bytes(256)] * count)


def read(edge: StorageEdge, hashes: list[str]) -> Any:
    return edge.batch_get(
        hashes, [bytearray(512) for _ in hashes], [bytearray(256) for _ in hashes]
    )


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_no_error_of_storage_leaves_the_edge(
    edge: StorageEdge, backend: RecordingBackend, hashes: Hashes, error: Exception
) -> None:
    write(edge, hashes(4))
    backend.fail = dict.fromkeys(("batch_set", "batch_get", "exists"), error)
    for verb in (write, read):
        result = verb(edge, hashes(4))
        assert result.target == [False] * 4
        assert result.draft is not None
        assert len(result.draft) == 4
        assert result.usable_pages == 0
    assert edge.exists(hashes(4)).usable == 0
    assert edge.counts.errors == 3
    backend.fail.clear()
    assert read(edge, hashes(4)).usable_pages == 4


@pytest.mark.parametrize("hook", ["batch_set", "batch_get"])
def test_an_error_of_the_draft_half_is_counted_and_costs_the_target_only_if_required(
    edge: StorageEdge, backend: RecordingBackend, hashes: Hashes, hook: str
) -> None:
    write(edge, hashes(2))
    backend.fail[f"draft {hook}"] = BackendError("gone", backend="memory", operation=hook)
    result = (write if hook == "batch_set" else read)(edge, hashes(2))
    assert result.target == [edge.pairs.pairing == "best_effort"] * 2
    assert edge.counts.errors == 1


def test_a_closed_store_is_a_miss(edge: StorageEdge, hashes: Hashes) -> None:
    write(edge, hashes(1))
    edge.pairs.store.close()
    assert read(edge, hashes(1)).usable_pages == 0
    assert write(edge, hashes(1)).target == [False]
    assert edge.exists(hashes(1)).usable == 0


def test_lengths_that_do_not_fit_are_a_miss_and_move_no_byte(
    edge: StorageEdge, backend: RecordingBackend, hashes: Hashes
) -> None:
    write(edge, hashes(3))
    backend.calls.clear()
    buffers = [bytearray(b"\xee" * 512) for _ in range(8)]
    result = edge.batch_get(hashes(3), buffers, None)
    assert result.target == [False] * 3
    assert all(set(buffer) == {0xEE} for buffer in buffers)
    assert backend.calls == []


def test_what_an_operator_needs_is_counted_apart(
    edge: StorageEdge, backend: RecordingBackend, hashes: Hashes
) -> None:
    keys = hashes(4)
    backend.refuse = {keys[3]}
    write(edge, keys)
    pairs = edge.pairs
    assert pairs.draft is not None
    pairs.store.delete(pairs.draft, ["d:" + keys[1]])
    read(edge, keys)
    edge.exists(keys)
    edge.exists(keys[3:])
    counts = edge.counts
    assert (counts.written_pages, counts.refused_pages, counts.orphan_drafts) == (3, 1, 1)
    required = pairs.pairing == "required"
    assert (counts.target_hits, counts.draft_hits, counts.lost_drafts) == (3, 2, 1)
    assert counts.usable_pages == (1 if required else 3)
    assert (counts.lookups, counts.lookup_pages, counts.first_page_missing) == (2, 5, 1)
    assert counts.found_pages == (1 if required else 3)


def test_a_dead_store_costs_a_log_line_and_not_one_a_page(
    edge: StorageEdge, backend: RecordingBackend, hashes: Hashes, caplog: pytest.LogCaptureFixture
) -> None:
    backend.fail = {"exists": OSError(5, "I/O error")}
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            edge.exists(hashes(1))
    assert len(caplog.records) == 1
    assert "I/O error" in caplog.text
    assert edge.failures.counts["lookup"] == 50


def test_an_interrupt_is_not_swallowed(edge: StorageEdge, hashes: Hashes) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    edge.pairs.exists = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        edge.exists(hashes(1))
