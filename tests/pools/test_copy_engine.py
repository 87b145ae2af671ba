"""What the CUDA driver is asked for, by a driver that does it on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pools.typed_calls import TypedCall

from hicache_storage.pools import copy_engine
from hicache_storage.pools import driver as cuda_driver
from hicache_storage.pools.row_copies import RowCopies

STREAM = (1 << 40) + 77
"""A handle is an address."""


class Driver:
    """The functions of libcuda that the copies use, in one of three versions."""

    def __init__(self, version: str) -> None:
        self.calls: list[str] = []
        self.counts: list[int] = []
        """Copies of each batch."""
        self.status = 0
        second = version == "second"
        if version in ("first", "second"):
            ending = "_v2" if second else ""
            self._add(f"cuMemcpyBatchAsync{ending}", self._batch)
            self._add(f"cuMemcpy3DBatchAsync{ending}", self._batch_of_rows)
        self._add("cuMemcpyAsync", self._one)
        self._add("cuMemcpy2DAsync_v2", self._one_of_rows)

    def _add(self, name: str, work: Any) -> None:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            assert arguments[-1] == STREAM
            if self.status == 0:
                work(*arguments[:-1])
            return self.status

        setattr(self, name, TypedCall(call))

    def cuGetErrorString(self, status: int, text: Any) -> None:  # noqa: N802
        text._obj.value = b"invalid argument"

    def _batch(self, targets: Any, sources: Any, sizes: Any, count: Any, *rest: Any) -> None:
        self.counts.append(count)
        attributes, first, groups = rest[:3]
        assert len(rest) - 3 == (0 if self.calls[-1].endswith("_v2") else 1)
        assert attributes._obj.order == 1
        assert (first._obj.value, groups) == (0, 1)
        lists = [
            np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(each))
            for each in (targets, sources, sizes)
        ]
        for target, source, size in zip(*lists, strict=True):
            ctypes.memmove(int(target), int(source), int(size))

    def _batch_of_rows(self, count: Any, operations: Any, *rest: Any) -> None:
        assert len(rest) == (1 if self.calls[-1].endswith("_v2") else 2)
        assert rest[-1] == 0, "no flags"
        for i in range(count):
            words = (ctypes.c_uint64 * 14).from_address(operations + 112 * i)
            kind, source, source_pitch, source_height, _ = words[:5]
            assert kind == 1
            kind, target, target_pitch, _, _ = words[5:10]
            assert kind == 1
            width, height, depth, order = words[10:]
            assert (depth, order, source_height) == (1, 1, height)
            for row in range(height):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def _one(self, target: Any, source: Any, size: Any) -> None:
        ctypes.memmove(target, source, size)

    def _one_of_rows(self, shape: Any) -> None:
        copy = shape._obj
        assert {copy.source_type, copy.target_type} == {1, 2}
        source = copy.source_host if copy.source_type == 1 else copy.source_device
        target = copy.target_host if copy.target_type == 1 else copy.target_device
        for row in range(copy.height):
            ctypes.memmove(
                target + row * copy.target_pitch, source + row * copy.source_pitch, copy.width
            )


@pytest.fixture(params=["second", "first", "none"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver(request.param)
    monkeypatch.setattr(cuda_driver, "library", lambda: fake)
    for found in (cuda_driver.call, cuda_driver.has, cuda_driver.versioned):
        found.cache_clear()
    yield fake
    for found in (cuda_driver.call, cuda_driver.has, cuda_driver.versioned):
        found.cache_clear()


def pieces(height: int, count: int) -> tuple[list[RowCopies], torch.Tensor, torch.Tensor]:
    """Copies of `height` rows of 5 bytes, and the memory at both ends."""
    source = torch.randint(0, 256, (count, height, 7), dtype=torch.uint8)
    target = torch.zeros(count, height, 6, dtype=torch.uint8)
    addresses = [
        (end.data_ptr() + np.arange(count) * end.stride(0)).astype(np.uint64)
        for end in (source, target)
    ]
    return [RowCopies(addresses[0], addresses[1], 5, height, 7, 6)], source, target


@pytest.mark.parametrize("to_device", [False, True])
@pytest.mark.parametrize("batched", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("count", [1, 256, 600])
@pytest.mark.parametrize("height", [1, 3])
def test_every_row_is_copied_and_nothing_beside_it(
    driver: Driver, height: int, count: int, batched: bool, to_device: bool
) -> None:
    copies, source, target = pieces(height, count)
    copy_engine.copy(copies, STREAM, to_device=to_device, batched=batched)
    assert torch.equal(target[:, :, :5], source[:, :, :5])
    assert not target[:, :, 5].any()
    if batched and hasattr(driver, "cuMemcpyBatchAsync_v2"):
        assert len(driver.calls) == -(-count // 256), "256 copies a call"


@pytest.mark.parametrize("batched", [False, True], ids=["pageable", "pinned"])
def test_copies_of_several_shapes_are_asked_for_together(driver: Driver, batched: bool) -> None:
    shapes = [pieces(1, 4), pieces(2, 3), pieces(5, 2), pieces(1, 1), pieces(3, 6)]
    copies = [piece for found, *_ in shapes for piece in found]
    copy_engine.copy(copies, STREAM, to_device=True, batched=batched)
    for _, source, target in shapes:
        assert torch.equal(target[:, :, :5], source[:, :, :5])
        assert not target[:, :, 5].any()
    if batched and "cuMemcpyAsync" not in driver.calls:
        assert len(driver.calls) == 2, "one of single rows, one of several"


@pytest.mark.parametrize("batch", [256, 64, 12])
@pytest.mark.parametrize("batched", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("count", [1, 16, 700])
def test_stretches_of_any_size_are_copied_the_first_few_at_once(
    driver: Driver, count: int, batched: bool, batch: int
) -> None:
    source = torch.randint(1, 256, (count, 7), dtype=torch.uint8)
    target = torch.zeros(count, 7, dtype=torch.uint8)
    sizes = np.arange(count) % 7 + 1
    ends = [end.data_ptr() + 7 * np.arange(count) for end in (source, target)]
    copies = np.array([*ends, sizes])
    copy_engine.copy_stretches(copies, STREAM, batched=batched, batch=batch)
    for i, size in enumerate(sizes):
        assert torch.equal(target[i, :size], source[i, :size])
        assert not target[i, size:].any()
    if batched and len(driver.counts):
        few = [12, 4] if batch == 12 else [16]
        many = {256: [256, 256, 188], 64: [64, 192, 256, 188], 12: [12, 36, 108, 256, 256, 32]}
        assert driver.counts == {1: [1], 16: few, 700: many[batch]}[count]


def test_no_copies_are_nothing_to_ask_for(driver: Driver) -> None:
    copy_engine.copy_stretches(np.zeros((3, 0), np.int64), STREAM, batched=True)
    copy_engine.copy([], STREAM, to_device=True, batched=True)
    assert not driver.calls


def test_a_copy_may_be_longer_than_4_gib(driver: Driver) -> None:
    given: list[int] = []
    driver.cuMemcpyAsync = TypedCall(lambda *arguments: given.extend(arguments) or 0)
    copy_engine.copy_one(1 << 46, 1 << 45, 5 << 30, STREAM)
    assert given == [1 << 45, 1 << 46, 5 << 30, STREAM]


def test_a_refused_copy_is_an_error_that_says_which(driver: Driver) -> None:
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"cuMemcpy\w+: 1 \(invalid argument\)"):
        copy_engine.copy(pieces(1, 2)[0], STREAM, to_device=True, batched=True)
