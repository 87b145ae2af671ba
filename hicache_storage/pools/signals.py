"""Signals: by which one kernel says of layer after layer that it has arrived.

A launch for each layer would have to wait until the model, which computes the layer before, gives
multiprocessors up again: then neither goes on beside the other.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from . import driver

_log = logging.getLogger(__name__)
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
        self.exact = True
        """Whether what is expected is what will come. Say that it isn't before a kernel is asked
        for, and call `expect` behind it: what breaks off in between must not be believed."""

    def expect(self, layers: int, programs: int) -> None:
        """A kernel has been asked for, each of whose programs adds 1 to the first `layers`
        counters: to each when it has brought its share of that layer."""
        for cell in range(layers):
            self._expected[cell] += programs
        self.exact = True

    def hold(self, stream: int, layer: int) -> None:
        """Has the stream with this handle wait until all that is expected of a layer has come."""
        cell = self.cells.data_ptr() + layer * _CELL_BYTES
        driver.call(_WAIT)(stream, cell, self._expected[layer] & 0xFFFFFFFF, _AT_LEAST)

    def settle(self) -> None:
        """Expects what has come, after a call that failed. Nothing may be under way."""
        self._expected = self.cells.tolist()
        self.exact = True


def signals(counting: torch.cuda.Stream, waiting: torch.cuda.Stream) -> Signals | None:
    """For kernels on one stream, and waits on another. None where the driver has no such waits,
    which the log says once."""
    device = waiting.device
    # On an idle stream, so that the counters are there when this returns.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        found = Signals(torch.tensor([0] * _CELLS, dtype=torch.int32, device=device))
        for stream in (counting, waiting):
            found.cells.record_stream(stream)
        try:
            found.hold(waiting.cuda_stream, 0)
        except (AttributeError, RuntimeError) as error:
            _say_once(str(error))
            return None
    return found


@functools.cache
def _say_once(error: str) -> None:
    _log.warning(
        "streams can't wait for counters (%s): kernels bring pages with a launch for each layer, "
        "which takes longer beside a model",
        error,
    )
