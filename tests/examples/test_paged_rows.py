"""PagedRows gives the models what a contiguous cache gives them, wherever the pages lie."""

from __future__ import annotations

import pytest
import torch
from model import ContiguousCache, Target
from paged import PagedRows, PageTable

from hicache_storage.pools.device import DevicePool, MHADevicePool, MLADevicePool
from hicache_storage.pools.geometry import PageGeometry

PAGE_SIZE = 4
CPU = torch.device("cpu")


def device_pool(target: Target, pages: int = 16) -> DevicePool:
    heads, dim = target.config.kv_row_shape
    values = dim if target.config.has_values else 0
    kind = "mha" if values else "mla"
    geometry = PageGeometry(
        kind, target.config.layers, heads, dim, values, PAGE_SIZE, torch.bfloat16
    )
    pool = (MHADevicePool if values else MLADevicePool)(geometry, pages)
    for layer in range(geometry.layers):
        for tensor in pool.layer_tensors(layer):
            tensor.fill_(float("nan"))  # a row that is read before it is written spoils everything
    return pool


def table(*pages: int) -> PageTable:
    return PageTable(torch.tensor(pages), PAGE_SIZE, CPU)


def run(target: Target, tokens: torch.Tensor, start: int, kv) -> torch.Tensor:
    positions = torch.arange(start, start + len(tokens))
    return target(tokens, positions, kv).last


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("piece", [1, 3, 4, 5, 100])
def test_paged_rows_equal_a_contiguous_cache(pair, length, piece):
    target, _ = pair
    tokens = torch.randint(0, target.config.vocab, (length,))
    pool, pages, contiguous = device_pool(target), table(9, 2, 11, 5), ContiguousCache(3)
    for start in range(0, length, piece):
        stop = min(start + piece, length)
        expected = run(target, tokens[start:stop], start, contiguous)
        found = run(target, tokens[start:stop], start, PagedRows(pool, pages, start, stop))
        assert torch.equal(found, expected)


def test_rows_beyond_the_end_are_overwritten_and_never_read(pair):
    target, _ = pair
    tokens = torch.randint(0, target.config.vocab, (7,))
    pool, pages, contiguous = device_pool(target), table(3, 1, 2), ContiguousCache(3)
    run(target, tokens[:3], 0, PagedRows(pool, pages, 0, 3))
    run(target, tokens.flip(0), 3, PagedRows(pool, pages, 3, 10))  # rejected, all of them
    run(target, tokens[:3], 0, contiguous)
    expected = run(target, tokens[3:], 3, contiguous)
    assert torch.equal(run(target, tokens[3:], 3, PagedRows(pool, pages, 3, 7)), expected)


def test_sequences_in_one_pool_share_a_prefix_and_nothing_else(pair):
    target, _ = pair
    pool = device_pool(target)
    prefix, ends = torch.tensor([1, 2, 3, 4]), (torch.tensor([0, 1, 2]), torch.tensor([4, 3, 0]))
    tables = table(7, 1), table(7, 12)
    run(target, prefix, 0, PagedRows(pool, tables[0], 0, 4))
    contiguous = [ContiguousCache(3), ContiguousCache(3)]
    for kv in contiguous:
        run(target, prefix, 0, kv)
    for i in range(3):  # in turn, a token at a time
        for end, pages, kv in zip(ends, tables, contiguous, strict=True):
            found = run(target, end[i : i + 1], 4 + i, PagedRows(pool, pages, 4 + i, 5 + i))
            assert torch.equal(found, run(target, end[i : i + 1], 4 + i, kv))


class Loading:
    """Records which layers were waited for, and writes their rows only then."""

    def __init__(self, pool: DevicePool, rows: list[list[torch.Tensor]]) -> None:
        self.pool, self.rows, self.waited = pool, rows, []

    def wait(self, layer: int) -> None:
        self.waited.append(layer)
        for tensor, rows in zip(self.pool.layer_tensors(layer), self.rows[layer], strict=True):
            tensor[: len(rows)] = rows


def test_each_layer_waits_for_its_own_rows_before_it_reads_them(pair):
    target, _ = pair
    tokens = torch.randint(0, target.config.vocab, (6,))
    pool, pages = device_pool(target), table(0, 1)
    run(target, tokens[:4], 0, PagedRows(pool, pages, 0, 4))
    expected = run(target, tokens[4:], 4, PagedRows(pool, pages, 4, 6))
    rows = [[tensor[:4].clone() for tensor in pool.layer_tensors(layer)] for layer in range(3)]

    other = device_pool(target)
    loading = Loading(other, rows)
    found = run(target, tokens[4:], 4, PagedRows(other, pages, 4, 6, loading))
    assert torch.equal(found, expected)
    assert loading.waited == [0, 1, 2]


@pytest.mark.parametrize(("start", "stop"), [(0, 9), (8, 9), (3, 3), (-1, 2)])
def test_positions_outside_of_the_pages_are_an_error(pair, start, stop):
    target, _ = pair
    with pytest.raises(ValueError, match="outside of the sequence's 8 slots"):
        PagedRows(device_pool(target), table(0, 1), start, stop)


def test_a_table_can_move_to_other_pages_that_hold_the_same_rows(pair):
    target, _ = pair
    pool, pages = device_pool(target), table(0, 1)
    tokens = torch.randint(0, target.config.vocab, (6,))
    run(target, tokens[:4], 0, PagedRows(pool, pages, 0, 4))
    expected = run(target, tokens[4:], 4, PagedRows(pool, pages, 4, 6))
    for layer in range(3):
        for tensor in pool.layer_tensors(layer):
            tensor[5 * PAGE_SIZE : 6 * PAGE_SIZE] = tensor[:PAGE_SIZE]
            tensor[:PAGE_SIZE] = float("nan")
    pages.replace(torch.tensor([5, 1]))
    assert torch.equal(run(target, tokens[4:], 4, PagedRows(pool, pages, 4, 6)), expected)
