"""Signals: by which one kernel says of layer after layer that it has arrived.

A launch for each layer would have to wait until the model, which computes the layer before, gives
multiprocessors up again: then neither goes on beside the other.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import driver

_CELLS = 1024
_CELL_BYTES = 4
_WAIT = "cuStreamWaitValue32_v2"
_AT_LEAST = 0


class Signals:
    """Counters on the device. They only go up, and start again from 0 behind 2**32 - 1.

    Kernels that count must be in one stream, so that a counter's values come in order.
    """

    most = _CELLS
    """Layers of a kernel that has a counter for each."""

    def __init__(self, cells: Tensor) -> None:
        self.cells = cells
        self._expected = [0] * _CELLS

    def expect(self, layers: int, programs: int) -> None:
        """Call it once a kernel has been asked for: each of its programs adds 1 to the first
        `layers` counters, to each when it has brought its share of that layer."""
        for cell in range(layers):
            self._expected[cell] += programs

    def hold(self, stream: int, layer: int) -> None:
        """Has the stream with this handle wait until all that is expected of a layer has come."""
        driver.call(_WAIT)(
            ctypes.c_void_p(stream),
            ctypes.c_uint64(self.cells.data_ptr() + layer * _CELL_BYTES),
            ctypes.c_uint32(self._expected[layer] & 0xFFFFFFFF),
            ctypes.c_uint(_AT_LEAST),
        )

    def settle(self) -> None:
        """Expects what has come, after a call that failed. Nothing may be under way."""
        self._expected = self.cells.tolist()


def signals(stream: torch.cuda.Stream) -> Signals | None:
    """Signals that this stream can wait for; None where the driver has none."""
    device = stream.device
    # On an idle stream, so that the counters are there when this returns.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        found = Signals(torch.tensor([0] * _CELLS, dtype=torch.int32, device=device))
        try:
            found.hold(stream.cuda_stream, 0)
        except (AttributeError, RuntimeError):
            return None
    return found
