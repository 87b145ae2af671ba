"""Copies by the device's copy engines, asked for in batches: they leave the multiprocessors alone.

Goes to the CUDA driver directly, since torch asks for one copy at a time. A driver without batches
(before CUDA 12.8) and memory that isn't pinned get one call a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import driver
from .row_copies import RowCopies
from .stretches import Copies

BATCH = 256
"""Copies a call: with pieces of 128 KiB 54.0 GB/s on an H200, 53.5 with 64 a call, which takes the
caller a tenth longer, and 45 with 8192."""
FIRST_BATCH = 12
"""Copies of the first call where the device has nothing else to do: it begins when a call has been
asked for, which takes it and each of its copies half a microsecond and more."""
NEXT_BATCH = 100
"""Copies of the first call where the device soon has nothing else to do."""
_GROWTH = 3
"""From call to call: what one brings takes the link 3 to 5 times as long as the caller takes to ask
for it, by the processor, and each call costs the link 3 us."""
Words = npt.NDArray[Any]
"""Of 8 bytes each."""
_SOURCE_IN_STREAM_ORDER = 1
_POINTER = 1
_HOST, _DEVICE = 1, 2

_OPERATION = np.dtype(
    [
        (f"{end}{name}", kind)
        for end in ("source_", "target_")
        for name, kind in (
            ("type", "i4"),
            ("_", "i4"),
            ("address", "u8"),
            ("pitch", "u8"),
            ("height", "u8"),
            ("place", "u8"),
        )
    ]
    + [("width", "u8"), ("height", "u8"), ("depth", "u8"), ("order", "i4"), ("flags", "u4")]
)
"""CUDA_MEMCPY3D_BATCH_OP of the driver, for two pointers."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of the driver."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = ctypes.byref(_Attributes(order=_SOURCE_IN_STREAM_ORDER))
_FIRST = ctypes.byref(ctypes.c_size_t(0))
"""The attributes of all copies of a batch, from its first on."""
_WORD_BYTES = 8
"""Of an address, and of a size."""

_END = (
    ("x", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver."""

    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _END),
        *((f"target_{name}", kind) for name, kind in _END),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy(copies: Sequence[RowCopies], stream: int, *, to_device: bool, batched: bool) -> None:
    """Asks for all copies on the stream with this handle, which isn't the default one. Never waits
    for the device, unless host memory isn't pinned. Raises RuntimeError if CUDA refuses.

    `batched` needs pinned host memory. The copies may happen in any order.
    """
    if not batched or not driver.has("cuMemcpyBatchAsync"):
        for piece in copies:
            _one_by_one(piece, stream, to_device)
        return
    single = [piece for piece in copies if piece.height == 1]
    if single:
        arrays = zip(*((each.source, each.target, _widths(each)) for each in single), strict=True)
        _batches(np.array([np.concatenate(array) for array in arrays]), stream, BATCH)
    rows = [piece for piece in copies if piece.height > 1]
    if rows:
        _batches_of_rows(rows, stream)


def copy_stretches(copies: Copies, stream: int, *, batched: bool, batch: int = BATCH) -> None:
    """The same, for copies of one row each, the first `batch` of them in the first call."""
    if batched and driver.has("cuMemcpyBatchAsync"):
        _batches(copies, stream, batch)
        return
    for source, target, size in copies.T.tolist():
        copy_one(source, target, size, stream)


def copy_one(source: int, target: int, size: int, stream: int) -> None:
    """One copy of `size` bytes between two addresses."""
    driver.call("cuMemcpyAsync")(target, source, size, stream)


def _batches(copies: Words, stream: int, batch: int) -> None:
    """In calls of `batch` copies, then of _GROWTH times as many, up to BATCH. `copies` as of
    `stretches.Copies`."""
    row = copies.shape[1] * _WORD_BYTES
    if row == 0:
        return
    source = _address(copies)
    end = source + row
    call, failed = driver.versioned("cuMemcpyBatchAsync")
    while source < end:
        some = min(batch, (end - source) // _WORD_BYTES)
        sizes, target = source + 2 * row, source + row
        call(target, source, sizes, some, _IN_STREAM_ORDER, _FIRST, 1, *failed, stream)
        source += some * _WORD_BYTES
        batch = min(_GROWTH * batch, BATCH)


def _address(array: Words) -> int:
    """Of an array that isn't empty; what `array.ctypes` says too, after more work."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


def _widths(piece: RowCopies) -> npt.NDArray[np.uint64]:
    return np.full(len(piece.source), piece.width, dtype=np.uint64)


def _batches_of_rows(pieces: Sequence[RowCopies], stream: int) -> None:
    counts = [len(piece.source) for piece in pieces]

    def each(values: list[int]) -> Words:
        return np.repeat(np.array(values, dtype=np.uint64), counts)

    operations = np.zeros(sum(counts), dtype=_OPERATION)
    heights = each([piece.height for piece in pieces])
    for end, addresses, pitches in (
        ("source_", [piece.source for piece in pieces], [piece.source_pitch for piece in pieces]),
        ("target_", [piece.target for piece in pieces], [piece.target_pitch for piece in pieces]),
    ):
        operations[f"{end}type"] = _POINTER
        operations[f"{end}address"] = np.concatenate(addresses)
        operations[f"{end}pitch"] = each(pitches)
        operations[f"{end}height"] = heights
    operations["width"] = each([piece.width for piece in pieces])
    operations["height"], operations["depth"] = heights, 1
    operations["order"] = _SOURCE_IN_STREAM_ORDER
    call, failed = driver.versioned("cuMemcpy3DBatchAsync")
    for start in range(0, len(operations), BATCH):
        batch = operations[start : start + BATCH]
        call(len(batch), _address(batch), *failed, 0, stream)


def _one_by_one(piece: RowCopies, stream: int, to_device: bool) -> None:
    pairs = zip(piece.source.tolist(), piece.target.tolist(), strict=True)
    if piece.height == 1:
        for source, target in pairs:
            copy_one(source, target, piece.width, stream)
        return
    call = driver.call("cuMemcpy2DAsync_v2")
    ends = (_HOST, _DEVICE) if to_device else (_DEVICE, _HOST)
    shape = _Copy2D(
        source_type=ends[0],
        target_type=ends[1],
        source_pitch=piece.source_pitch,
        target_pitch=piece.target_pitch,
        width=piece.width,
        height=piece.height,
    )
    for source, target in pairs:
        if to_device:
            shape.source_host, shape.target_device = source, target
        else:
            shape.source_device, shape.target_host = source, target
        call(ctypes.byref(shape), stream)
