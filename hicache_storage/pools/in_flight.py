"""InFlight: copies in one direction that may not be done yet, and which later ones must wait."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .indices import Slots


class Moving(Protocol):
    """A copy of pages under way."""

    @property
    def asked(self) -> bool:
        """Whether all of it has been asked for."""
        ...

    @property
    def events(self) -> tuple[Any, ...]:
        """CUDA events that are done when every byte has arrived. Asks for all of it."""
        ...

    def done(self) -> bool:
        """Whether every byte has arrived."""
        ...


class InFlight:
    """Copies of one direction. One thread uses it."""

    def __init__(self) -> None:
        self._moving: list[tuple[Moving, Slots, Slots]] = []

    def add(self, moving: Moving, device_indices: Tensor, host_indices: Tensor) -> None:
        """Remembers a copy of these slots until it is done. On the CPU it is done already."""
        self._moving = [entry for entry in self._moving if not _done(entry[0])]
        if device_indices.numel() and not _done(moving):
            self._moving.append((moving, _slots(device_indices), _slots(host_indices)))

    def sharing(self, device_indices: Any, host_indices: Any) -> list[Any]:
        """The events of copies that use one of these slots, at either end."""
        moving = [entry for entry in self._moving if not _done(entry[0])]
        if not moving or not (_is_list(device_indices) and _is_list(host_indices)):
            return []
        ends = [_slots(indices) for indices in (device_indices, host_indices)]
        return [
            event
            for copy, *theirs in moving
            if any(_meet(ours, slots) for ours, slots in zip(ends, theirs, strict=True))
            for event in copy.events
        ]


def _done(moving: Moving) -> bool:
    return moving.asked and moving.done()


def _slots(indices: Tensor) -> Slots:
    # A copy: the caller may change its own.
    slots: Slots = indices.detach().cpu().numpy().copy()
    return slots


def _is_list(indices: Any) -> bool:
    """Whether these can be slots; the copy itself will say what is wrong with others."""
    return (
        isinstance(indices, torch.Tensor)
        and indices.dtype == torch.int64
        and indices.numel() > 0
        and int(indices.min()) >= 0
    )


def _meet(ours: Slots, theirs: Slots) -> bool:
    seen = np.zeros(max(int(ours.max()), int(theirs.max())) + 1, dtype=np.bool_)
    seen[theirs] = True
    return bool(seen[ours].any())
