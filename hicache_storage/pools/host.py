"""HostPool: pages in host memory, one allocation, read and written in place by storage."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..page import AnyPage, FlatSpans
from . import layouts
from .geometry import PageGeometry
from .indices import page_list
from .layouts import Layout, Piece
from .memory import HostMemory
from .short_rows import ShortRows, short_rows


class HostPool:
    """`num_pages` page slots in one page-aligned, zeroed allocation.

    `layout` says where the rows lie (see `layouts`); `pin` None pins the memory where CUDA is
    present. Distinct slots may be used by distinct threads at once.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        num_pages: int,
        layout: Layout = "page_first",
        pin: bool | None = None,
    ) -> None:
        layouts.check_layout(layout)
        if num_pages < 1:
            raise ConfigError(f"a host pool needs at least 1 page, got {num_pages}")
        self.geometry = geometry
        self.num_pages = num_pages
        self.layout: Layout = layout
        self.order = layouts.token_order(layout)
        self.size_bytes = num_pages * geometry.page_bytes
        self.pieces: tuple[Piece, ...] = layouts.pieces(layout, geometry, num_pages)
        self._memory = HostMemory(
            self.size_bytes, pin=torch.cuda.is_available() if pin is None else pin
        )
        self._stretches = [
            (self._memory.view[piece.start :][: piece.length * num_pages], piece.length)
            for piece in self.pieces
        ]
        self._lengths = {length for _, length in self._stretches}
        self._short = None
        if len(self._lengths) == 1:
            starts, (length,) = [piece.start for piece in self.pieces], self._lengths
            self._short = short_rows(self._memory.view, starts, length, length, num_pages)
        self.parts = self._parts()
        self._rows = tuple(
            layouts.by_page(layout, geometry.page_size, part.view(torch.uint8))
            for part in self.parts
        )

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with CUDA."""
        return self._memory.pinned

    @property
    def kv_buffer(self) -> Tensor | None:
        """All parts in one tensor, in SGLang's shape: that of a part, for MHA with a leading 2.
        None if the rows of K and V differ in size."""
        if len(self.parts) == 1:
            return self.parts[0]
        if self.parts[0].shape != self.parts[1].shape:
            return None
        return self._memory.tensor.view(self.geometry.dtype).view(2, *self.parts[0].shape)

    def page_rows(self, part: int) -> Tensor:
        """A part as bytes by page and layer: a uint8 view (P, L, S, H, bytes per head)."""
        return self._rows[part]

    def piece_rows(self, piece: Piece) -> Tensor:
        """One piece of every page: a contiguous uint8 view (P, piece.length)."""
        return self._memory.tensor[piece.start :][: piece.length * self.num_pages].view(
            self.num_pages, piece.length
        )

    def spans(self, index: int) -> AnyPage:
        """The page in slot `index`, in place: writable memoryviews over the pool itself, which
        keep its memory alive. All of K, then all of V."""
        if not 0 <= index < self.num_pages:
            raise IndexError(f"page {index} is outside of the pool's {self.num_pages} pages")
        if self._short is not None:
            return ShortRows(self._short[index], self.geometry.page_bytes)
        # One slice object serves all spans of a length: a layer-first page has many of them.
        cut = {n: slice(index * n, index * n + n) for n in self._lengths}
        page = FlatSpans([stretch[cut[n]] for stretch, n in self._stretches])
        page.length_bytes = self.geometry.page_bytes
        return page

    def zero(self, indices: Tensor) -> None:
        """Fills the pages in these slots with zero bytes."""
        slots = page_list("zeroed pages", indices, self.num_pages)
        for piece in self.pieces:
            rows = self.piece_rows(piece).numpy()
            rows[slots] = np.uint8(0)

    def _parts(self) -> tuple[Tensor, ...]:
        """Each part with its layout's shape, of the logical type."""
        parts = []
        start = 0
        for part, length in enumerate(self.geometry.part_bytes):
            shape = layouts.part_shape(self.layout, self.geometry, self.num_pages, part)
            flat = self._memory.tensor[start : start + length * self.num_pages]
            parts.append(flat.view(self.geometry.dtype).view(shape))
            start += length * self.num_pages
        return tuple(parts)
