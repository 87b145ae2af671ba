"""The pages of one of SGLang's host pools, as spans over the pool's own memory.

A pool shows a page in two ways: as a tensor (`get_data_page`), which the calls without zero copy
use, and as addresses (`get_page_buffer_meta`). The order of a page's bytes is that of the tensor,
so that all calls give the same object. Where the tensor is a view of the pool, its contiguous
runs are the spans, whatever the layout; where it is a copy, the addresses are, if their bytes are
the tensor's; else pages are copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, PageSizeMismatch
from ..page import AnyPage, FlatSpans, PageSpans, zero_spans
from ..pools.short_rows import ShortRows, short_rows

MOST_RUNS = 4096
"""Runs of a page beyond which a copy is cheaper."""


class _Run(NamedTuple):
    """A contiguous stretch of each page: of page i at `start + i * step` of `memory`."""

    memory: memoryview
    start: int
    step: int
    length: int


class HostPages:
    """All pages of a host pool. `page_size` in tokens, or slots of a pool of states."""

    page_bytes: int
    in_place: bool

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_size: int = getattr(pool, "page_size", 1) or 1
        self.num_pages: int = getattr(pool, "page_num", 0) or pool.size // self.page_size

    def pages(self, count: int, host_indices: Tensor | None) -> list[int]:
        """The page numbers of `count` pages from the indices of all their tokens.

        Raises PageSizeMismatch if they are not as many, don't start at pages, or lie outside.
        """
        found = 0 if host_indices is None else host_indices.numel()
        if found != count * self.page_size:
            raise PageSizeMismatch(
                f"{count} pages of {self.page_size} tokens need {count * self.page_size} host "
                f"indices, got {found}"
            )
        if host_indices is None:
            return []
        tokens: list[int] = host_indices.reshape(-1).tolist()
        starts, ends = tokens[:: self.page_size], tokens[self.page_size - 1 :: self.page_size]
        for start, end in zip(starts, ends, strict=True):
            if start % self.page_size or end != start + self.page_size - 1:
                raise PageSizeMismatch(f"host indices {start}..{end} are not one page's")
            if not 0 <= start < self.num_pages * self.page_size:
                raise PageSizeMismatch(f"host index {start} is outside of the pool")
        return [start // self.page_size for start in starts]

    def to_write(self, pages: Sequence[int]) -> list[AnyPage]:
        """The pages' bytes, in place or copied."""
        raise NotImplementedError

    def to_read(self, pages: Sequence[int]) -> tuple[list[AnyPage], Callable[[list[bool]], None]]:
        """Spans to read pages into, and what to call with the hits afterwards."""
        raise NotImplementedError

    def zero(self, page: int) -> None:
        """Fills a page with zero bytes."""
        raise NotImplementedError


class InPlacePages(HostPages):
    """Pages that are spans over the pool itself."""

    in_place = True

    def __init__(self, pool: Any, runs: Sequence[_Run]) -> None:
        super().__init__(pool)
        self.page_bytes = sum(run.length for run in runs)
        paces = sorted({(run.step, run.length) for run in runs})
        self._paces = tuple(paces)
        self._stretches = tuple(
            (run.memory[run.start :], paces.index((run.step, run.length))) for run in runs
        )
        self._short = None
        if len(paces) == 1 and all(run.memory is runs[0].memory for run in runs):
            starts, (step, length) = [run.start for run in runs], paces[0]
            self._short = short_rows(runs[0].memory, starts, step, length, self.num_pages)

    def spans(self, page: int) -> AnyPage:
        if self._short is not None:
            return ShortRows(self._short[page], self.page_bytes)
        # One slice object serves all runs of a pace: a layer-first page has many of them.
        cuts = [slice(page * step, page * step + length) for step, length in self._paces]
        return FlatSpans([stretch[cuts[pace]] for stretch, pace in self._stretches])

    def to_write(self, pages: Sequence[int]) -> list[AnyPage]:
        return [self.spans(page) for page in pages]

    def to_read(self, pages: Sequence[int]) -> tuple[list[AnyPage], Callable[[list[bool]], None]]:
        return self.to_write(pages), lambda hits: None

    def zero(self, page: int) -> None:
        zero_spans(self.spans(page))


class CopiedPages(HostPages):
    """Pages that a pool can't show in place: they pass through flat tensors."""

    in_place = False

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        empty = pool.get_dummy_flat_data_page()
        self.page_bytes = empty.numel() * empty.element_size()

    def to_write(self, pages: Sequence[int]) -> list[AnyPage]:
        return [
            tensor_spans(self.pool.get_data_page(page * self.page_size, flat=True).contiguous())
            for page in pages
        ]

    def to_read(self, pages: Sequence[int]) -> tuple[list[AnyPage], Callable[[list[bool]], None]]:
        flat = [self.pool.get_dummy_flat_data_page() for _ in pages]

        def finish(hits: list[bool]) -> None:
            for page, tensor, hit in zip(pages, flat, hits, strict=True):
                if hit:
                    self.pool.set_from_flat_data_page(page * self.page_size, tensor)

        return [tensor_spans(tensor) for tensor in flat], finish

    def zero(self, page: int) -> None:
        self.pool.set_from_flat_data_page(
            page * self.page_size, self.pool.get_dummy_flat_data_page().zero_()
        )


def host_pages(pool: Any) -> HostPages:
    """The pages of a host pool, in place if that can be.

    Raises ConfigError for a pool that has no memory of its own.
    """
    name = type(pool).__name__
    if _has_slots_only(pool):
        raise ConfigError(
            f"host pool {name} has no memory of its own, only page slots; storing the pages of "
            "such models is not supported"
        )
    if getattr(pool, "shared_allocation_domain", None) is not None:
        return CopiedPages(pool)  # its pages move while the server runs
    memory = _Memory(pool)
    runs = _view_runs(pool, memory) or _address_runs(pool, memory)
    if runs is not None:
        return InPlacePages(pool, runs)
    try:
        copied = CopiedPages(pool)
    except Exception as error:
        raise ConfigError(f"host pool {name} shows its pages in no known way: {error}") from error
    if copied.page_bytes == 0:
        raise ConfigError(f"host pool {name} has pages of 0 bytes; it is not supported")
    return copied


def _has_slots_only(pool: Any) -> bool:
    if getattr(pool, "size_per_token", 1) == 0:
        return True
    if getattr(pool, "kv_buffer", pool) is not None:
        return False
    try:
        return bool(pool.get_data_page(0, flat=True).numel() == 0)
    except Exception:
        return True


def tensor_spans(tensor: Tensor) -> PageSpans:
    """A contiguous CPU tensor as one span over its memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise PageSizeMismatch(
            f"a page must be contiguous host memory, got a tensor on {tensor.device} with strides "
            f"{tensor.stride()}"
        )
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return FlatSpans([flat.numpy().data])


class _Memory:
    """The tensors of a pool as memory: whole storages, by address."""

    def __init__(self, pool: Any) -> None:
        self._regions: dict[int, memoryview] = {}
        for tensor in _tensors(pool):
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" and storage.nbytes():
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._regions[storage.data_ptr()] = flat.numpy().data

    def find(self, address: int, length: int) -> tuple[memoryview, int] | None:
        """The region that holds these bytes, and their offset in it."""
        for base, region in self._regions.items():
            if base <= address and address + length <= base + len(region):
                return region, address - base
        return None

    def runs(self, pages: Sequence[list[tuple[int, int]]], last: int) -> list[_Run] | None:
        """Runs from the (address, length) lists of the first page, the second and the last;
        None unless all of them are this memory, at even distances."""
        if len({len(page) for page in pages}) != 1:
            return None
        runs = []
        for stretches in zip(*pages, strict=True):
            places = [self.find(*stretch) for stretch in stretches]
            if None in places or len({length for _, length in stretches}) != 1:
                return None
            region, start = places[0]  # type: ignore[misc]
            step = stretches[1][0] - stretches[0][0]
            if stretches[-1][0] != stretches[0][0] + last * step or places[-1][0] is not region:  # type: ignore[index]
                return None
            runs.append(_Run(region, start, step, stretches[0][1]))
        return runs


def _tensors(pool: Any) -> Iterator[Tensor]:
    for value in list(vars(pool).values()):
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Tensor):
                yield one


def _samples(pool: Any) -> tuple[list[int], int]:
    """Token indices of the first, second and last page, and the last page's number."""
    page_size = getattr(pool, "page_size", 1) or 1
    last = (getattr(pool, "page_num", 0) or pool.size // page_size) - 1
    return [0, min(1, last) * page_size, last * page_size], last


def _view_runs(pool: Any, memory: _Memory) -> list[_Run] | None:
    """Runs from pages as views, in the order of their elements."""
    samples, last = _samples(pool)
    try:
        views = [pool.get_data_page(index, flat=False) for index in samples]
        pages = [_contiguous_runs(view) for view in views]
    except Exception:  # the pool has no such pages; what it has is tried next
        return None
    found = [page for page in pages if page is not None]
    return memory.runs(found, last) if len(found) == len(pages) else None


def _address_runs(pool: Any, memory: _Memory) -> list[_Run] | None:
    """Runs from the addresses that the pool gives, unless its flat pages have another order."""
    samples, last = _samples(pool)
    page_size = getattr(pool, "page_size", 1) or 1
    pages = []
    try:
        for index in samples:
            addresses, lengths = pool.get_page_buffer_meta(torch.arange(index, index + page_size))
            pages.append(list(zip(addresses, lengths, strict=True)))
    except Exception:
        return None
    runs = memory.runs(pages, last)
    if runs is None or not runs:
        return None
    try:
        flat = pool.get_data_page(0, flat=True)
    except Exception:
        return runs  # the pool has addresses only
    found = b"".join(InPlacePages(pool, runs).spans(0))
    return runs if found == bytes(tensor_spans(flat.contiguous())[0]) else None


def _contiguous_runs(view: Tensor) -> list[tuple[int, int]] | None:
    """The contiguous stretches of a tensor in the order of its elements, as (address, bytes)."""
    size = view.element_size()
    length, inner = size, view.dim()
    for dim in reversed(range(view.dim())):
        if view.shape[dim] != 1 and view.stride(dim) * size != length:
            break
        length *= view.shape[dim]
        inner = dim
    outer = list(zip(view.shape[:inner], view.stride()[:inner], strict=True))
    if length == 0 or math.prod(n for n, _ in outer) > MOST_RUNS:
        return None
    runs: list[tuple[int, int]] = []
    for place in itertools.product(*(range(n) for n, _ in outer)):
        offset = sum(i * stride for i, (_, stride) in zip(place, outer, strict=True))
        runs.append((view.data_ptr() + offset * size, length))
    return runs
