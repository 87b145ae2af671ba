"""The Triton kernel that moves rows between two places, on the device or in pinned host memory.

A plane is what one part of a pool has in one layer: row after row of equal length, with a step
from token to token and from page to page that may differ at the two ends. The kernel takes
addresses, not tensors, since the device reads and writes pinned host memory over the link.
Imported where CUDA is used only; needs triton.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

CAN_LAUNCH_COMPILED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
"""Whether what a launch gives back is launched with the same arguments: that takes half as long,
since Triton doesn't look for what it has compiled for such arguments. Their types and the
compile-time ones must stay the same."""
ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Types by size in bytes. Two adjacent ones of 8 make an access of 16 bytes."""


@triton.jit(
    do_not_specialize=[
        "first_plane",
        "planes",
        "layers",
        "units",
        "source_page_step",
        "source_token_step",
        "target_page_step",
        "target_token_step",
        "tokens",
        "units_a_row",
    ],
    do_not_specialize_on_alignment=[
        "source_bases",
        "target_bases",
        "source_pages",
        "target_pages",
        "arrived",
    ],
)
def move_rows(
    source_bases,
    target_bases,
    source_pages,
    target_pages,
    arrived,
    first_plane,
    planes,
    layers,
    units,
    source_page_step,
    source_token_step,
    target_page_step,
    target_token_step,
    tokens,
    units_a_row,
    unit_elements: tl.constexpr,
    element_type: tl.constexpr,
    element_bytes: tl.constexpr,
    aligned: tl.constexpr,
    tile_units: tl.constexpr,
    planes_together: tl.constexpr,
):
    """Moves `units` units in each of `planes` planes of each of `layers` layers, `tile_units` at a
    time. A program adds 1 to `arrived[i]` once it has done its share of layer i.

    A plane's base is its address in `source_bases` and `target_bases`; a row is `units_a_row`
    units, a unit `unit_elements` adjacent elements. Steps are in bytes; every address is a
    multiple of `aligned`. `planes_together` takes the same rows of all planes before the next.
    """
    tiles = tl.cdiv(units, tile_units)
    element = tl.pointer_type(element_type)
    within = tl.arange(0, unit_elements)[None, :]
    for layer in range(layers):
        first = first_plane + layer * planes
        for item in range(tl.program_id(0), planes * tiles, tl.num_programs(0)):
            if planes_together:
                plane = first + item % planes
                tile = item // planes
            else:
                plane = first + item // tiles
                tile = item % tiles
            unit = tile * tile_units + tl.arange(0, tile_units)
            here = unit < units
            row = unit // units_a_row
            page = row // tokens
            token = (row - page * tokens).to(tl.int64)
            offset = (unit - row * units_a_row).to(tl.int64) * (unit_elements * element_bytes)
            source_page = tl.load(source_pages + page, mask=here, other=0)
            target_page = tl.load(target_pages + page, mask=here, other=0)
            source = tl.load(source_bases + plane) + offset
            target = tl.load(target_bases + plane) + offset
            source += source_page * source_page_step + token * source_token_step
            target += target_page * target_page_step + token * target_token_step
            reads = tl.multiple_of(source[:, None].to(element) + within, [aligned, aligned])
            writes = tl.multiple_of(target[:, None].to(element) + within, [aligned, aligned])
            mask = here[:, None]
            rows = tl.load(reads, mask=mask, eviction_policy="evict_first")
            tl.store(writes, rows, mask=mask, eviction_policy="evict_first")
        # All threads' writes come before the counting, which whoever waits for it sees first.
        tl.debug_barrier()
        tl.atomic_add(arrived + layer, 1, sem="release", scope="sys")
