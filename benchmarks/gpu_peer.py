"""SGLang's own host pools as a way of moving pages, where SGLang and its kernels are installed.

Its paths take token indices, and each wants them in another place: its kernels read both lists on
the device, but for the backup of `page_first`, which takes the host's on the CPU where it goes
through staging memory; its copy-engine paths read both on the CPU, `layer_first` in the order of
host tokens. They run on a stream of their own, as in its cache controller: the batched copies that
they ask for aren't allowed on the default stream. "In place" is the host pool's call alone, with
the indices where they are wanted. "Asked for" is with what the controller adds: it brings the
indices there, fences both streams and records an event a layer.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_pools import TOKENS, Way, comes_back, draw, in_order

from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.layouts import Layout

PATHS: dict[Layout, tuple[str, ...]] = {
    "layer_first": ("kernel", "direct"),
    "page_first": ("kernel",),
    "page_first_direct": ("direct",),
}
"""What SGLang 0.5.16 has for a layout. "direct" asks for one copy a layer and page."""


def is_here() -> bool:
    return all(importlib.util.find_spec(name) for name in ("sglang", "sgl_kernel"))


class Peer:
    """A device pool and a host pool of SGLang, of this geometry, with random bytes; as many pages
    of it as a pool of ours has, and twice as many host pages."""

    def __init__(
        self, geometry: PageGeometry, layout: Layout, path: str, count: int | None = None
    ) -> None:
        """Moves all pages, or `count` of them."""
        device, host = _pools(geometry, layout)
        self.device, self.host, self.path = device, host, path
        self.layers, self.layout = geometry.layers, layout
        if geometry.kind == "mha":
            self.tensors = [*device.k_buffer, *device.v_buffer]
        else:
            self.tensors = list(device.kv_buffer)
        self.tensors = [tensor.view(torch.uint8) for tensor in self.tensors]
        draw(self.tensors)
        pages, size = TOKENS // geometry.page_size, geometry.page_size
        count = count or pages
        # Its device pool has a page more, the first, which no request gets.
        self.pages = _tokens(in_order("random", pages, count) + 1, size)
        self.slots = _tokens(in_order("random", 2 * pages, count), size)
        self.on_device = self.pages.cuda()
        self.stream = torch.cuda.Stream()
        self.kernels = "compiled" if getattr(host, "can_use_jit", False) else "packaged"

    def close(self) -> None:
        self.host.destroy()
        self.tensors = []
        del self.device, self.host
        torch.cuda.empty_cache()

    def equal(self) -> bool:
        """Whether its pages come back; the page that it leaves alone must not change either."""
        size = len(self.tensors[0]) - len(self.pages)
        used = [tensor[size:] for tensor in self.tensors]
        way = self.in_place()
        return comes_back(used, way.backup, way.load)

    def in_place(self) -> Way:
        out, back = self._placed("backup"), self._placed("load")

        def backup() -> float:
            start = time.perf_counter()
            with torch.cuda.stream(self.stream):
                self._backup(*out)
            asked = time.perf_counter() - start
            self.stream.synchronize()
            return asked

        def load() -> float:
            start = time.perf_counter()
            with torch.cuda.stream(self.stream):
                for layer in range(self.layers):
                    self._load(*back, layer)
            asked = time.perf_counter() - start
            self.stream.synchronize()
            return asked

        return Way(backup, load)

    def asked_for(self) -> Way:
        def backup() -> float:
            start = time.perf_counter()
            placed = self._placed("backup")
            self._fence()
            with torch.cuda.stream(self.stream):
                self._backup(*placed)
                done = torch.cuda.Event()
                done.record()
            asked = time.perf_counter() - start
            done.synchronize()
            return asked

        def load() -> float:
            start = time.perf_counter()
            events = self._load_by_layer()
            asked = time.perf_counter() - start
            events[-1].synchronize()
            return asked

        return Way(backup, load)

    def by_layer(self) -> Callable[[int], None]:
        """Asks for a load-back; what makes the current stream wait for a layer."""
        events = self._load_by_layer()
        return lambda layer: torch.cuda.current_stream().wait_event(events[layer])

    def _load_by_layer(self) -> list[torch.cuda.Event]:
        placed = self._placed("load")
        self._fence()
        events = []
        with torch.cuda.stream(self.stream):
            for layer in range(self.layers):
                self._load(*placed, layer)
                events.append(torch.cuda.Event())
                events[-1].record()
        return events

    def _fence(self) -> None:
        before = torch.cuda.Event()
        before.record()
        self.stream.wait_event(before)

    def _placed(self, verb: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and device tokens where this path wants them. The host's are on the CPU at first,
        the device's on the device, as its allocators give them."""
        if self.path == "kernel":
            staged = getattr(self.host, "can_use_write_back_jit", False)
            if verb == "backup" and self.layout == "page_first" and staged:
                return self.slots, self.on_device
            return self.slots.to("cuda", non_blocking=True), self.on_device
        if self.layout == "layer_first":
            slots, order = self.slots.sort()
            return slots, self.on_device.cpu().index_select(0, order)
        return self.slots, self.on_device.cpu()

    def _backup(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        self.host.backup_from_device_all_layer(self.device, slots, pages, self.path)

    def _load(self, slots: torch.Tensor, pages: torch.Tensor, layer: int) -> None:
        self.host.load_to_device_per_layer(self.device, slots, pages, layer, self.path)


def _tokens(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    return (pages[:, None] * page_size + torch.arange(page_size)).flatten()


def _pools(geometry: PageGeometry, layout: Layout) -> tuple[Any, Any]:
    from sglang.srt import server_args
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    try:
        arguments = server_args.ServerArgs(model_path="none", page_size=geometry.page_size)
        server_args.set_global_server_args_for_scheduler(arguments)
    except Exception as error:  # some versions read the model here; the pools don't need it
        print(f"SGLang's arguments aren't set: {error!r:.120}", flush=True)
    common = {
        "size": TOKENS,
        "page_size": geometry.page_size,
        "dtype": geometry.dtype,
        "layer_num": geometry.layers,
        "device": "cuda",
        "enable_memory_saver": False,
    }
    if geometry.kind == "mha":
        device = MHATokenToKVPool(head_num=geometry.heads, head_dim=geometry.head_dim, **common)
        return device, MHATokenToKVPoolHost(device, 2.0, 0, geometry.page_size, layout)
    device = MLATokenToKVPool(kv_lora_rank=geometry.head_dim - 64, qk_rope_head_dim=64, **common)
    return device, MLATokenToKVPoolHost(device, 2.0, 0, geometry.page_size, layout)
