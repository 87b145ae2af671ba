"""Counters by which a kernel says which layers have arrived, by a driver on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hicache_storage.pools import driver
from hicache_storage.pools.signals import Signals

STREAM = 9


class Driver:
    """Keeps what streams are to wait for."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int, int]] = []
        """Stream, address and value."""

    def cuStreamWaitValue32_v2(  # noqa: N802
        self, stream: Any, address: Any, value: Any, flags: Any
    ) -> int:
        assert flags.value == 0, "a counter may have gone on"
        self.waits.append((stream.value, address.value, value.value))
        return 0


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    fake = Driver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    driver.call.cache_clear()
    yield fake.waits
    driver.call.cache_clear()


def test_a_layer_waits_for_all_programs_of_all_kernels_so_far(
    waits: list[tuple[int, int, int]],
) -> None:
    signals = Signals(torch.zeros(Signals.most, dtype=torch.int32))
    signals.expect(3, 8)
    signals.expect(2, 4)
    for layer in range(4):
        signals.hold(STREAM, layer)
    first = signals.cells.data_ptr()
    assert waits == [
        (STREAM, first, 12),
        (STREAM, first + 4, 12),
        (STREAM, first + 8, 8),
        (STREAM, first + 12, 0),
    ]


def test_counters_start_again_behind_the_last_number(waits: list[tuple[int, int, int]]) -> None:
    """The driver compares as the difference says, so that they may."""
    signals = Signals(torch.zeros(Signals.most, dtype=torch.int32))
    for _ in range(3):
        signals.expect(1, 1 << 31)
    signals.expect(1, 5)
    signals.hold(STREAM, 0)
    assert waits == [(STREAM, signals.cells.data_ptr(), (1 << 31) + 5)]


def test_after_a_failed_call_only_what_has_come_is_expected(
    waits: list[tuple[int, int, int]],
) -> None:
    """A kernel that was never launched would be waited for for ever, and one that was launched
    without being counted would let the next layers go too early."""
    signals = Signals(torch.zeros(Signals.most, dtype=torch.int32))
    signals.expect(2, 8)
    signals.cells[0], signals.cells[1] = 16, -3
    signals.settle()
    signals.expect(2, 8)
    for layer in range(2):
        signals.hold(STREAM, layer)
    assert [value for _, _, value in waits] == [24, 5]
