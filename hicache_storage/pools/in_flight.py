"""InFlight: copies in one direction that may not be done yet, and which later ones must wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .indices import Slots


class InFlight:
    """Copies of one direction. One thread uses it."""

    def __init__(self) -> None:
        self._moving: list[tuple[Sequence[Any], Slots, Slots]] = []

    def add(self, events: Sequence[Any], device_indices: Tensor, host_indices: Tensor) -> None:
        """Remembers a copy of these slots until its events are done. On the CPU it has none."""
        self._moving = [entry for entry in self._moving if not _done(entry[0])]
        if device_indices.numel() and not _done(events):
            self._moving.append((events, _slots(device_indices), _slots(host_indices)))

    def sharing(self, device_indices: Any, host_indices: Any) -> list[Any]:
        """The events of copies that use one of these slots, at either end."""
        moving = [entry for entry in self._moving if not _done(entry[0])]
        if not moving or not (_is_list(device_indices) and _is_list(host_indices)):
            return []
        ends = [_slots(indices) for indices in (device_indices, host_indices)]
        return [
            event
            for events, *theirs in moving
            if any(_meet(ours, slots) for ours, slots in zip(ends, theirs, strict=True))
            for event in events
        ]


def _done(events: Sequence[Any]) -> bool:
    return all(event.query() for event in events)


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
