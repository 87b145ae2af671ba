"""One sequence's KV rows in pages of a device pool.

The pool keeps one tensor (slots, H, D) a layer for K and one for V, or one in all for MLA; a slot
holds one token, page i the slots from i * page_size on. A sequence owns a page table; the target's
pool and the draft's share it, so one index names a target page and its draft page.
Shapes: T new tokens, S tokens of the sequence so far (new ones included), H heads, D row size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class DevicePool(Protocol):
    """What this module needs of a pool of `hicache_storage.pools.device`."""

    def layer_tensors(self, layer: int) -> tuple[Tensor, ...]:
        """K and V (slots, H, D) of a layer, or its one latent tensor (slots, 1, D)."""
        ...


class LayerLoading(Protocol):
    """What a load-back in flight offers (`hicache_storage.pools.transfer.LayerEvents`)."""

    def wait(self, layer: int) -> None:
        """Return once the layer's rows may be read."""
        ...


class PageTable:
    """Which device pages hold a sequence, in its order."""

    def __init__(self, pages: Tensor, page_size: int, device: torch.device) -> None:
        self.page_size, self.device = page_size, device
        self.replace(pages)

    def replace(self, pages: Tensor) -> None:
        """Use `pages` (n,), int64 page indices of the device pool, from now on."""
        self.pages = pages
        slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
        self.slots = slots.flatten().to(self.device)

    @property
    def room_tokens(self) -> int:
        """Tokens that the pages can hold."""
        return len(self.slots)


class PagedRows:
    """The `KVAccess` of one forward call over the tokens at positions `start` to `stop`.

    Rows from `start` on that an earlier call wrote, such as rejected guesses, are overwritten.
    `loading` is what still brings the rows before `start`: each layer waits for its own only, so
    the first layers compute while the last ones still arrive.
    """

    def __init__(
        self,
        pool: DevicePool,
        table: PageTable,
        start: int,
        stop: int,
        loading: LayerLoading | None = None,
    ) -> None:
        if not 0 <= start < stop <= table.room_tokens:
            raise ValueError(
                f"positions {start} to {stop} lie outside of the sequence's {table.room_tokens} "
                "slots; it needs more pages"
            )
        self.pool, self.loading = pool, loading
        self.new, self.all = table.slots[start:stop], table.slots[:stop]

    def update(self, layer: int, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Store (T, H, D) rows in the pool's dtype; return copies (S, H, D) of all rows.

        A serving kernel would read the pages where they are; gathering keeps this one readable.
        """
        if self.loading is not None:
            self.loading.wait(layer)
        rows = []
        for tensor, new in zip(self.pool.layer_tensors(layer), (k, v), strict=False):
            assert new is not None, "the model gives no V rows, but the pool wants them"
            tensor[self.new] = new.to(tensor.dtype)
            rows.append(tensor[self.all])
        return rows[0], rows[1] if len(rows) > 1 else None
