"""Lease: the pages that one request holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..pools.transfer import LayerEvents
from .radix_tree import PageNode


@dataclass(eq=False)
class Lease:
    """Pages of a prefix, locked on the device until `HiCache.release`.

    The page counts add up to what `acquire` found; `insert` makes the lease longer, not them.
    """

    request_id: str
    hashes: list[str]
    device_indices: Tensor
    """Device page of each hash, int64 (n,) on the CPU. The tree's own: read, never write."""
    drafts: list[bool] | None
    """Whether each page carries its real draft; where it doesn't, the draft half is zero.
    None without a draft pool."""
    loading: LayerEvents
    """Wait for its layer i before layer i of the forward pass reads the pages."""
    from_device: int = 0
    from_host: int = 0
    from_storage: int = 0
    """Pages that a prefetch of this request brought."""
    nodes: list[PageNode] = field(default_factory=list, repr=False)
    reading: list[PageNode] = field(default_factory=list, repr=False)
    """Nodes whose host page a load-back may still read."""
    released: bool = False

    def __len__(self) -> int:
        return len(self.hashes)
