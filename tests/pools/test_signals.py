"""Counters by which a kernel says which layers have arrived, by a driver on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools.typed_calls import TypedCall

from hicache_storage.pools import driver
from hicache_storage.pools import signals as signals_module
from hicache_storage.pools.signals import Signals, signals

STREAM = (1 << 40) + 9


def in_memory() -> Signals:
    return Signals(torch.zeros(Signals.most, dtype=torch.int32))


class Driver:
    """Keeps what streams are to wait for."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int, int]] = []
        """Stream, address and value."""
        self.cuStreamWaitValue32_v2 = TypedCall(self._wait)

    def _wait(self, stream: int, address: int, value: int, flags: int) -> int:
        assert flags == 0, "a counter may have gone on"
        self.waits.append((stream, address, value))
        return 0


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    fake = Driver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    driver.call.cache_clear()
    yield fake.waits
    driver.call.cache_clear()


@pytest.fixture
def made_on(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams that use counters which `signals` makes, in memory."""
    found: list[Any] = []
    for name in ("device", "stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda of: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda cells, stream: found.append(stream))
    signals_module._say_once.cache_clear()
    return found


LINK: Any = SimpleNamespace(cuda_stream=4, device=torch.device("cpu"))
SIDE: Any = SimpleNamespace(cuda_stream=STREAM, device=torch.device("cpu"))


def test_counters_start_from_zero_and_outlive_the_streams_that_use_them(
    waits: list[tuple[int, int, int]], made_on: list[Any]
) -> None:
    made = signals(LINK, SIDE)
    assert made is not None
    assert not made.cells.any()
    assert waits == [(STREAM, made.cells.data_ptr(), 0)]
    assert made_on == [LINK, SIDE]


@pytest.mark.parametrize("status", [None, 801])
def test_a_driver_that_cannot_wait_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    made_on: list[Any],
    status: int | None,
) -> None:
    wait = {} if status is None else {"cuStreamWaitValue32_v2": lambda *given: status}
    fake = SimpleNamespace(cuGetErrorString=lambda *given: 0, **wait)
    monkeypatch.setattr(driver, "library", lambda: fake)
    driver.call.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert signals(LINK, SIDE) is None
        assert signals(LINK, SIDE) is None
    driver.call.cache_clear()
    (record,) = caplog.records
    assert "a launch for each layer" in record.message


def test_a_layer_waits_for_all_programs_of_all_kernels_so_far(
    waits: list[tuple[int, int, int]],
) -> None:
    counters = in_memory()
    counters.expect(3, 8)
    counters.expect(2, 4)
    for layer in range(4):
        counters.hold(STREAM, layer)
    first = counters.cells.data_ptr()
    assert waits == [
        (STREAM, first, 12),
        (STREAM, first + 4, 12),
        (STREAM, first + 8, 8),
        (STREAM, first + 12, 0),
    ]


def test_counters_start_again_behind_the_last_number(waits: list[tuple[int, int, int]]) -> None:
    """The driver compares as the difference says, so that they may."""
    counters = in_memory()
    for _ in range(3):
        counters.expect(1, 1 << 31)
    counters.expect(1, 5)
    counters.hold(STREAM, 0)
    assert waits == [(STREAM, counters.cells.data_ptr(), (1 << 31) + 5)]


def test_after_a_failed_call_only_what_has_come_is_expected(
    waits: list[tuple[int, int, int]],
) -> None:
    """A kernel that was never launched would be waited for for ever, and one that was launched
    without being counted would let the next layers go too early."""
    counters = in_memory()
    counters.expect(2, 8)
    counters.exact = False
    counters.cells[0], counters.cells[1] = 16, -3
    counters.settle()
    assert counters.exact
    counters.expect(2, 8)
    for layer in range(2):
        counters.hold(STREAM, layer)
    assert [value for _, _, value in waits] == [24, 5]
