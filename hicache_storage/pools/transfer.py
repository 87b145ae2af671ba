"""Copies of pages between device and host pools: backup, and load-back layer by layer.

Both move raw bytes, whatever the element type. On the CPU a copy is done when the call returns.
On CUDA it runs on the streams of a lane: the slots at both ends belong to the copy until its
events are done (`Transfer.done`, `LayerEvents.done`), and nobody may reuse, read or store them
before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, PageSizeMismatch
from . import cuda_backup, cuda_prepare
from .cuda_load_back import Loading
from .device import DevicePool
from .host import HostPool
from .indices import Slots, page_list
from .lanes import Lane, shared_lane
from .routes import routes
from .strategy import Strategy, check_strategy

Pair = tuple[DevicePool, HostPool]


class Transfer:
    """A backup under way. Keeps its pools alive until it is done."""

    def __init__(self, pools: Sequence[Pair], events: Sequence[Any] = ()) -> None:
        self._pools = tuple(pools)
        self.events = tuple(events)
        """CUDA events that are done when every byte has arrived."""
        self.asked = True
        """All of it has been asked for."""

    def done(self) -> bool:
        """Whether every byte has arrived. Never waits."""
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """Returns when every byte has arrived. Holds no lock; any thread may wait."""
        for event in self.events:
            event.synchronize()

    synchronize = wait


class LayerEvents:
    """A load-back under way, with events for each layer so that the forward pass overlaps it.

    `layers` is the number of layers of the longest pool. A draft with fewer layers takes part
    in the first ones, so its layer i is there when layer i is.

    When it is made, the first layers have been asked for. A method that is about a layer asks for
    the layers up to that one and for some that follow, so that a forward pass needn't wait until
    all have been asked for; the next call on the lane asks for what is left. So keep it until it is
    done. Any thread may call the methods. If layers can't be asked for, they raise, as they do
    while the current stream is captured (ConfigError); the next one tries again.
    """

    def __init__(self, pools: Sequence[Pair], layers: int, loading: Loading | None = None) -> None:
        self._pools = tuple(pools)
        self.layers = layers
        self._loading = loading

    @property
    def asked(self) -> bool:
        """Whether every layer has been asked for."""
        return self._loading is None or self._loading.asked == self.layers

    @property
    def events(self) -> tuple[Any, ...]:
        """CUDA events that are done when every layer has arrived."""
        return self.events_of(self.layers - 1)

    def events_of(self, layer: int) -> tuple[Any, ...]:
        """CUDA events that are done when this layer has arrived. Raises IndexError for a layer out
        of range."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} is outside of the {self.layers} that were loaded")
        loading = self._loading
        if loading is None:
            return ()
        if loading.asked < self.layers:
            _refuse_capture()
            lane = loading.lane
            with lane.lock, lane.on_device(), lane:
                loading.ask(layer)
        return loading.events(layer)

    def wait(self, layer: int) -> None:
        """Makes the current stream wait for this layer's pages. The CPU isn't held up; without
        CUDA the pages are there already. Raises IndexError for a layer out of range."""
        events = self.events_of(layer)
        if events:
            stream = torch.cuda.current_stream(self._pools[0][0].device)
            for event in events:
                stream.wait_event(event)

    def arrived(self, layer: int) -> bool:
        """Whether this layer's pages have arrived. Never waits for the device."""
        return all(event.query() for event in self.events_of(layer))

    def done(self) -> bool:
        """Whether every layer has arrived. Never waits for the device."""
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        """Returns when every layer has arrived."""
        for event in self.events:
            event.synchronize()


class Ends:
    """The pools at both ends of copies: a device pool and its host pool, and the draft's beside
    them. Raises ConfigError if they don't belong together.

    What doesn't change between calls is found out here, since the link waits for a call's first
    copy."""

    def __init__(
        self, device_pool: DevicePool, host_pool: HostPool, draft: Pair | None = None
    ) -> None:
        self.pools = ((device_pool, host_pool), *([draft] if draft is not None else []))
        for device, host in self.pools:
            if device.geometry != host.geometry:
                raise ConfigError(
                    f"the host pool is for {host.geometry}, the device pool has {device.geometry}"
                )
            if device.device != device_pool.device:
                raise ConfigError(f"draft on {device.device}, target on {device_pool.device}")
        self.device = device_pool.device
        self.layers = max(device.geometry.layers for device, _ in self.pools)
        self.device_pages = min(device.num_pages for device, _ in self.pools)
        self.host_pages = min(host.num_pages for _, host in self.pools)
        self._cuda = self.device.type == "cuda"
        self._routes = [routes(*pair) for pair in self.pools] if self._cuda else []

    def backup(
        self,
        device_indices: Tensor,
        host_indices: Tensor,
        *,
        lane: Lane | None = None,
        strategy: Strategy = "auto",
        after: Sequence[Any] = (),
    ) -> Transfer:
        """Copies pages from device slots to host slots, all layers; the draft's pages too.

        Index i of one goes to index i of the other. On CUDA it starts behind what the current
        stream has been given so far, and behind the events `after`. With a `lane` the current
        stream goes on meanwhile; without one, it waits. `strategy` is for CUDA (see `strategy`).
        Raises PageSizeMismatch or ConfigError for bad input before any byte moves. After another
        error the pages that were to be written may hold anything, and no copy is under way.
        """
        check_strategy(strategy)
        source, destination = self._slots(device_indices, host_indices, into="host")
        if not self._cuda:
            for device, host in self.pools:
                _backup_cpu(device, host, source, destination)
            return Transfer(self.pools)
        _refuse_capture()
        used = lane or shared_lane(self.device, "out")
        with used.lock, used.on_device(), used:
            events = cuda_backup.backup(self._routes, source, destination, used, strategy, after)
        if lane is None:
            _hold_current_stream(self.device, events)
        return Transfer(self.pools, events)

    def load_back(
        self,
        host_indices: Tensor,
        device_indices: Tensor,
        *,
        lane: Lane | None = None,
        strategy: Strategy = "auto",
        after: Sequence[Any] = (),
    ) -> LayerEvents:
        """Copies pages from host slots to device slots, layer by layer; the draft's pages too.

        Otherwise like `backup`.
        """
        check_strategy(strategy)
        destination, source = self._slots(device_indices, host_indices, into="device")
        if not self._cuda:
            for device, host in self.pools:
                _load_cpu(device, host, source, destination)
            return LayerEvents(self.pools, self.layers)
        _refuse_capture()
        used = lane or shared_lane(self.device, "back")
        with used.lock, used.on_device(), used:
            asked = Loading(self._routes, source, destination, used, strategy, after)
        loading = LayerEvents(self.pools, self.layers, asked)
        if lane is None:
            _hold_current_stream(self.device, loading.events)
        return loading

    def _slots(
        self, device_indices: Tensor, host_indices: Tensor, *, into: str
    ) -> tuple[Slots, Slots]:
        """Both lists as host arrays; slots that are written to must be distinct."""
        on_device = page_list(
            "device_indices", device_indices, self.device_pages, distinct=into == "device"
        )
        in_host = page_list("host_indices", host_indices, self.host_pages, distinct=into == "host")
        if len(on_device) != len(in_host):
            raise PageSizeMismatch(
                f"{len(on_device)} device pages but {len(in_host)} host pages (these are page "
                "indices, not token indices)"
            )
        return on_device, in_host


def backup(
    device_pool: DevicePool,
    host_pool: HostPool,
    device_indices: Tensor,
    host_indices: Tensor,
    *,
    draft: Pair | None = None,
    lane: Lane | None = None,
    strategy: Strategy = "auto",
    after: Sequence[Any] = (),
) -> Transfer:
    """`Ends.backup` between these pools; `draft` is (device pool, host pool)."""
    return Ends(device_pool, host_pool, draft).backup(
        device_indices, host_indices, lane=lane, strategy=strategy, after=after
    )


def load_back(
    host_pool: HostPool,
    device_pool: DevicePool,
    host_indices: Tensor,
    device_indices: Tensor,
    *,
    draft: Pair | None = None,
    lane: Lane | None = None,
    strategy: Strategy = "auto",
    after: Sequence[Any] = (),
) -> LayerEvents:
    """`Ends.load_back` between these pools; `draft` is (device pool, host pool) here too."""
    return Ends(device_pool, host_pool, draft).load_back(
        host_indices, device_indices, lane=lane, strategy=strategy, after=after
    )


def _refuse_capture() -> None:
    """Raises ConfigError while the current stream is captured; before a lane is made, which would
    break the capture."""
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "pages can't be moved while the current stream is captured into a CUDA graph: "
            "ask for copies before the graph is captured or replayed"
        )


def _hold_current_stream(device: torch.device, events: Sequence[Any]) -> None:
    stream = torch.cuda.current_stream(device)
    for event in events:
        stream.wait_event(event)


def _backup_cpu(device: DevicePool, host: HostPool, source: Slots, destination: Slots) -> None:
    # numpy: one thread, and no thread pool to wait for where the host is busy.
    for layer in range(device.geometry.layers):
        for part, rows in enumerate(device.page_rows(layer)):
            host.page_rows(part)[:, layer].numpy()[destination] = rows.numpy()[source]


def _load_cpu(device: DevicePool, host: HostPool, source: Slots, destination: Slots) -> None:
    for layer in range(device.geometry.layers):
        for part, rows in enumerate(device.page_rows(layer)):
            rows.numpy()[destination] = host.page_rows(part)[:, layer].numpy()[source]


def prepare(pair: Pair, out: Lane, back: Lane, strategy: Strategy) -> None:
    """Does for copies between these pools what would make the first ones slower than others:
    kernels are compiled, staging memory is made."""
    for lane, to_pool in ((out, False), (back, True)):
        with lane.lock, lane.on_device(), lane:
            lane.ask_for_the_rest()
            cuda_prepare.prepare(routes(*pair), lane, to_pool=to_pool, strategy=strategy)
