"""Host layouts: where a page's rows lie in a host pool.

Legend: L layers, P pages, N = P x S tokens, S page_size, H heads, D elements per head. One part
is the K, V or latent half of a pool:

    layout             one part         order        spans of a page (a part)
    layer_first        (L, N, H, D)     layer_token  L, one a layer
    page_first         (N, L, H, D)     token_layer  1
    page_first_direct  (P, L, S, H, D)  layer_token  1

The shapes are SGLang's, whose MHA pools put both parts into one tensor with a leading 2. A
page's spans are all of K and then all of V, so layouts of one order give the same bytes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from ..errors import ConfigError
from ..namespace import TokenOrder
from .geometry import PageGeometry

Layout = Literal["layer_first", "page_first", "page_first_direct"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class Piece(NamedTuple):
    """A contiguous stretch of every page: page i has it at `start + i * length`."""

    part: int
    """0 for K or latent, 1 for V."""
    layers: range
    """The layers whose rows it holds."""
    start: int
    """Byte offset in the pool's memory."""
    length: int
    """Bytes a page."""


def check_layout(layout: str) -> None:
    """Raises ConfigError unless `layout` is one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ConfigError(f"host layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")


def token_order(layout: Layout) -> TokenOrder:
    """The byte order of a page, as the namespace names it."""
    return "token_layer" if layout == "page_first" else "layer_token"


def part_shape(
    layout: Layout, geometry: PageGeometry, num_pages: int, part: int, layers: int | None = None
) -> list[int]:
    """Shape of one part in elements, with all layers or with as many as given."""
    layers = geometry.layers if layers is None else layers
    row = [geometry.heads, geometry.row_dims[part]]
    tokens = num_pages * geometry.page_size
    if layout == "layer_first":
        return [layers, tokens, *row]
    if layout == "page_first":
        return [tokens, layers, *row]
    return [num_pages, layers, geometry.page_size, *row]


def by_page(layout: Layout, page_size: int, part: Tensor) -> Tensor:
    """One part, of any element type, as a view (P, L, S, H, D)."""
    if layout == "layer_first":
        return part.view(len(part), -1, page_size, *part.shape[2:]).transpose(0, 1)
    if layout == "page_first":
        return part.view(-1, page_size, *part.shape[1:]).transpose(1, 2)
    return part


def pieces(layout: Layout, geometry: PageGeometry, num_pages: int) -> tuple[Piece, ...]:
    """The contiguous stretches that make up a page, in the order of its spans."""
    found = []
    start = 0
    for part, length in enumerate(geometry.part_bytes):
        if layout == "layer_first":
            one = length // geometry.layers
            for layer in range(geometry.layers):
                found.append(Piece(part, range(layer, layer + 1), start, one))
                start += one * num_pages
        else:
            found.append(Piece(part, range(geometry.layers), start, length))
            start += length * num_pages
    return tuple(found)
