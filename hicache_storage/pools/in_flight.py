"""InFlight: copies in one direction that may not be done yet, and which later ones must wait."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .indices import Slots


class Moving(Protocol):
    """A Transfer or LayerEvents."""

    events: tuple[Any, ...]

    def done(self) -> bool:
        """Whether every byte has arrived."""
        ...


class InFlight:
    """Copies of one direction. One thread uses it."""

    def __init__(self) -> None:
        self._moving: list[tuple[Moving, Slots, Slots]] = []

    def add(self, moving: Moving, device_indices: Tensor, host_indices: Tensor) -> None:
        """Remembers a copy of these slots until it is done. On the CPU it is already."""
        self._moving = [entry for entry in self._moving if not entry[0].done()]
        if not moving.done():
            self._moving.append((moving, _slots(device_indices), _slots(host_indices)))

    def sharing(self, device_indices: Any, host_indices: Any) -> list[Any]:
        """The events of copies that use one of these slots, at either end."""
        if not self._moving or not (_is_list(device_indices) and _is_list(host_indices)):
            return []
        ends = [np.unique(_slots(indices)) for indices in (device_indices, host_indices)]
        return [
            event
            for moving, *theirs in self._moving
            if any(_meet(ours, other) for ours, other in zip(ends, theirs, strict=True))
            for event in moving.events
        ]


def _slots(indices: Tensor) -> Slots:
    slots: Slots = np.unique(indices.detach().cpu().numpy())
    return slots


def _is_list(indices: Any) -> bool:
    """Whether these are indices at all; the copy itself will say what is wrong with others."""
    return isinstance(indices, torch.Tensor) and indices.dtype == torch.int64


def _meet(ours: Slots, theirs: Slots) -> bool:
    return bool(np.isin(ours, theirs, assume_unique=True).any())
