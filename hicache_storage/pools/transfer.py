"""Copies of pages between device and host pools: backup, and load-back layer by layer.

Both move raw bytes, whatever the element type. On the CPU a copy is done when the call returns.
On CUDA it runs on a stream: the slots at both ends belong to the copy until its events are done
(`Transfer.done`, `LayerEvents.done`), and nobody may reuse, read or store them before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..errors import ConfigError, PageSizeMismatch
from .device import DevicePool
from .host import HostPool
from .indices import Slots, page_list
from .layouts import Piece

Pair = tuple[DevicePool, HostPool]
_STAGED_BYTES = 64 << 20
"""Most device memory that a CUDA copy stages at a time."""


class Transfer:
    """A backup under way. Keeps its pools alive until it is done."""

    def __init__(self, pools: Sequence[Pair], event: torch.cuda.Event | None) -> None:
        self._pools = tuple(pools)
        self._event = event

    def done(self) -> bool:
        """Whether every byte has arrived. Never waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Returns when every byte has arrived. Holds no lock; any thread may wait."""
        if self._event is not None:
            self._event.synchronize()

    synchronize = wait


class LayerEvents:
    """A load-back under way, with an event for each layer so that the forward pass overlaps it.

    `layers` is the number of layers of the longest pool. A draft with fewer layers takes part
    in the first ones, so its layer i is there when layer i is.
    """

    def __init__(
        self, pools: Sequence[Pair], layers: int, events: Sequence[torch.cuda.Event] = ()
    ) -> None:
        self._pools = tuple(pools)
        self.layers = layers
        self._events = tuple(events)

    def wait(self, layer: int) -> None:
        """Makes the current stream wait for this layer's pages. The CPU isn't held up; without
        CUDA the pages are there already. Raises IndexError for a layer out of range."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} is outside of the {self.layers} that were loaded")
        if self._events:
            device = self._pools[0][0].device
            torch.cuda.current_stream(device).wait_event(self._events[layer])

    def done(self) -> bool:
        """Whether every layer has arrived. Never waits."""
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        """Returns when every layer has arrived."""
        if self._events:
            self._events[-1].synchronize()


def backup(
    device_pool: DevicePool,
    host_pool: HostPool,
    device_indices: Tensor,
    host_indices: Tensor,
    *,
    draft: Pair | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Transfer:
    """Copies pages from device slots to host slots, all layers; the draft's pages too.

    Index i of one goes to index i of the other. `stream` defaults to the current one; it waits
    for what the current stream has been given so far. Raises PageSizeMismatch or ConfigError
    before any byte moves.
    """
    pools = _pools(device_pool, host_pool, draft)
    source, destination = _slots(pools, device_indices, host_indices, into="host")
    with _on(device_pool.device, stream):
        for device, host in pools:
            if device.device.type == "cuda":
                _backup_cuda(device, host, source, destination)
            else:
                _backup_cpu(device, host, source, destination)
        cuda = device_pool.device.type == "cuda"
        return Transfer(pools, _record(device_pool.device) if cuda else None)


def load_back(
    host_pool: HostPool,
    device_pool: DevicePool,
    host_indices: Tensor,
    device_indices: Tensor,
    *,
    draft: Pair | None = None,
    stream: torch.cuda.Stream | None = None,
) -> LayerEvents:
    """Copies pages from host slots to device slots, layer by layer; the draft's pages too.

    Otherwise like `backup`; `draft` is (device pool, host pool) here too.
    """
    pools = _pools(device_pool, host_pool, draft)
    destination, source = _slots(pools, device_indices, host_indices, into="device")
    layers = max(device.geometry.layers for device, _ in pools)
    with _on(device_pool.device, stream):
        if device_pool.device.type == "cuda":
            events = _load_cuda(pools, layers, source, destination)
            return LayerEvents(pools, layers, events)
        for device, host in pools:
            _load_cpu(device, host, source, destination)
        return LayerEvents(pools, layers)


def _backup_cpu(device: DevicePool, host: HostPool, source: Slots, destination: Slots) -> None:
    # numpy: one thread, and no thread pool to wait for where the host is busy.
    for layer in range(device.geometry.layers):
        for part, rows in enumerate(device.page_rows(layer)):
            host.page_rows(part)[:, layer].numpy()[destination] = rows.numpy()[source]


def _load_cpu(device: DevicePool, host: HostPool, source: Slots, destination: Slots) -> None:
    for layer in range(device.geometry.layers):
        for part, rows in enumerate(device.page_rows(layer)):
            rows.numpy()[destination] = host.page_rows(part)[:, layer].numpy()[source]


def _backup_cuda(device: DevicePool, host: HostPool, source: Slots, destination: Slots) -> None:
    """Gathers pages on the device in the host's byte order, then copies each piece of a page."""
    for start, stop in _portions([(device, host)], len(source)):
        slots = _to_device(source[start:stop], device)
        for piece in host.pieces:
            layers = [
                device.page_rows(layer)[piece.part].index_select(0, slots) for layer in piece.layers
            ]
            staged = torch.stack(layers, dim=1 if host.order == "layer_token" else 2)
            rows = host.piece_rows(piece)
            for page, row in zip(
                destination[start:stop].tolist(), staged.view(len(slots), -1), strict=True
            ):
                rows[page].copy_(row, non_blocking=True)


def _load_cuda(
    pools: Sequence[Pair], layers: int, source: Slots, destination: Slots
) -> list[torch.cuda.Event]:
    """Copies each piece to the device when its first layer is due, then spreads it over the
    layers. With more than one portion, a layer's event stands behind the last portion's."""
    portions = _portions(pools, len(source))
    events = []
    for start, stop in portions:
        pages = source[start:stop].tolist()
        slots = _to_device(destination[start:stop], pools[0][0])
        staged: dict[tuple[int, int], Tensor] = {}
        for layer in range(layers):
            for which, (device, host) in enumerate(pools):
                for piece in host.pieces:
                    if piece.layers.start == layer:
                        rows = _fetch_piece(device, host, piece, pages)
                        staged[which, piece.part] = rows
                    if layer in piece.layers:
                        device.page_rows(layer)[piece.part].index_copy_(
                            0, slots, staged[which, piece.part][:, layer - piece.layers.start]
                        )
            if stop == len(source):
                events.append(_record(pools[0][0].device))
    return events


def _fetch_piece(device: DevicePool, host: HostPool, piece: Piece, pages: list[int]) -> Tensor:
    """One piece of these pages on the device, as uint8 (n, layers of the piece, S, H, B)."""
    rows = host.piece_rows(piece)
    staged = torch.empty(len(pages), piece.length, dtype=torch.uint8, device=device.device)
    for row, page in zip(staged, pages, strict=True):
        row.copy_(rows[page], non_blocking=True)
    size, heads, row_bytes = device.page_rows(0)[piece.part].shape[1:]
    count = len(piece.layers)
    if host.order == "layer_token":
        return staged.view(-1, count, size, heads, row_bytes)
    return staged.view(-1, size, count, heads, row_bytes).transpose(1, 2)


def _pools(device_pool: DevicePool, host_pool: HostPool, draft: Pair | None) -> list[Pair]:
    pools = [(device_pool, host_pool), *([draft] if draft is not None else [])]
    for device, host in pools:
        if device.geometry != host.geometry:
            raise ConfigError(
                f"the host pool is for {host.geometry}, the device pool has {device.geometry}"
            )
        if device.device != device_pool.device:
            raise ConfigError(f"draft on {device.device}, target on {device_pool.device}")
    return pools


def _slots(
    pools: Sequence[Pair], device_indices: Tensor, host_indices: Tensor, *, into: str
) -> tuple[Slots, Slots]:
    """Both lists as host arrays; slots that are written to must be distinct."""
    device_pages = min(device.num_pages for device, _ in pools)
    host_pages = min(host.num_pages for _, host in pools)
    on_device = page_list("device_indices", device_indices, device_pages, distinct=into == "device")
    in_host = page_list("host_indices", host_indices, host_pages, distinct=into == "host")
    if len(on_device) != len(in_host):
        raise PageSizeMismatch(
            f"{len(on_device)} device pages but {len(in_host)} host pages (these are page "
            "indices, not token indices)"
        )
    return on_device, in_host


def _portions(pools: Sequence[Pair], pages: int) -> list[tuple[int, int]]:
    """Ranges of pages that fit the staging limit, at least one page each."""
    step = max(1, _STAGED_BYTES // sum(device.geometry.page_bytes for device, _ in pools))
    return [(start, min(start + step, pages)) for start in range(0, pages, step)]


def _to_device(slots: Slots, pool: DevicePool) -> Tensor:
    # Through pinned memory, else the copy would wait for all that the stream has been given.
    return torch.from_numpy(slots).pin_memory().to(pool.device, non_blocking=True)


def _on(device: torch.device, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Runs the body on `stream`, behind what the current stream has been given."""
    if device.type != "cuda" or stream is None:
        return nullcontext()
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def _record(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
