"""HostPool: one aligned allocation whose spans are the pool itself."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools.pool_cases import MHA, MLA, geometries, host_page, poison, slots

from hicache_storage import ConfigError, PageSizeMismatch
from hicache_storage.page import as_spans
from hicache_storage.pools import memory
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import LAYOUTS, Layout


def address(span: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(span))


@given(geometries(), st.integers(1, 5), st.sampled_from(LAYOUTS))
def test_the_spans_of_all_pages_tile_the_pool(
    geometry: PageGeometry, num_pages: int, layout: Layout
) -> None:
    host = HostPool(geometry, num_pages, layout)
    assert host.size_bytes == num_pages * geometry.page_bytes
    stretches = []
    for page in range(num_pages):
        spans = host.spans(page)
        assert sum(map(len, spans)) == geometry.page_bytes
        stretches += [(address(span), len(span)) for span in spans]
    stretches.sort()
    start = stretches[0][0]
    assert start == host.parts[0].data_ptr()
    assert start % mmap.PAGESIZE == 0
    for at, length in stretches:
        assert at == start
        start += length
    assert start == stretches[0][0] + host.size_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spans_are_what_a_store_takes_and_no_copy(layout: Layout) -> None:
    host = HostPool(MHA, 3, layout)
    spans = host.spans(1)
    assert as_spans(spans, writable=True) == spans
    for span in spans:
        assert (span.format, span.ndim, span.readonly, span.contiguous) == ("B", 1, False, True)
        span[:] = b"\x07" * len(span)
    assert sum(int((part.view(torch.uint8) == 7).sum()) for part in host.parts) == MHA.page_bytes


def test_a_fresh_pool_is_zero() -> None:
    host = HostPool(MHA, 3)
    assert all(host_page(host, page) == bytes(MHA.page_bytes) for page in range(3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spans_keep_the_memory_alive(layout: Layout) -> None:
    host = HostPool(MLA, 300, layout)
    poison(host, 3)
    spans = host.spans(299)
    parts = host.parts
    del host
    gc.collect()
    assert b"".join(spans) == b"\x03" * MLA.page_bytes
    del spans
    gc.collect()
    assert int(parts[0].view(torch.uint8).min()) == 3


@pytest.mark.parametrize("index", [-1, 3, 2**62])
def test_a_page_outside_of_the_pool_has_no_spans(index: int) -> None:
    with pytest.raises(IndexError, match=f"page {index} is outside of the pool's 3 pages"):
        HostPool(MHA, 3).spans(index)


def test_many_spans_are_made_fast() -> None:
    """128 pages of 64 spans take about a millisecond; a tenth of a second is a fault."""
    geometry = PageGeometry("mha", 32, 1, 8, 8, 1, torch.bfloat16)
    host = HostPool(geometry, 128, "layer_first")
    best_s = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        pages = [as_spans(host.spans(page)) for page in range(128)]
        best_s = min(best_s, time.perf_counter() - start_s)
        assert len(pages[0]) == 64
    assert best_s < 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeroing_touches_the_named_pages_alone(layout: Layout) -> None:
    host = HostPool(MHA, 4, layout)
    poison(host)
    host.zero(slots([3, 1]))
    assert [set(host_page(host, page)) for page in range(4)] == [{0xAB}, {0}, {0xAB}, {0}]
    host.zero(slots([]))
    with pytest.raises(PageSizeMismatch):
        host.zero(slots([0, 4]))
    assert set(host_page(host, 0)) == {0xAB}


def test_k_and_v_of_unequal_rows_have_no_common_tensor() -> None:
    host = HostPool(PageGeometry("mha", 2, 2, 8, 6, 4, torch.bfloat16), 3)
    assert host.kv_buffer is None
    assert [tuple(part.shape) for part in host.parts] == [(12, 2, 2, 8), (12, 2, 2, 6)]


@pytest.mark.parametrize("num_pages", [0, -2])
def test_a_pool_without_pages_is_refused(num_pages: int) -> None:
    with pytest.raises(ConfigError, match=f"at least 1 page, got {num_pages}"):
        HostPool(MHA, num_pages)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_copy_of_its_own() -> None:
    host = HostPool(MHA, 2)
    child = multiprocessing.get_context("fork").Process(target=poison, args=(host,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert host_page(host, 0) == bytes(MHA.page_bytes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is present")
def test_pinning_without_a_device_is_refused_and_the_default_does_not_pin() -> None:
    assert HostPool(MHA, 1).pinned is False
    assert HostPool(MHA, 1, pin=False).pinned is False
    with pytest.raises(ConfigError, match="pin=True needs a CUDA device"):
        HostPool(MHA, 1, pin=True)


def test_memory_that_cannot_be_had_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="lower host_pages"):
        HostPool(MHA, 2**54)


def files(path: Any, **contents: str) -> Any:
    for name, text in contents.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def test_available_memory_is_the_least_that_kernel_and_control_group_allow(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:      50 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_bytes() == 50 * 1024
    files(tmp_path, memory_max="max\n")
    assert memory.available_bytes() == 50 * 1024
    stat = "anon 9000\nactive_file 200\ninactive_file 300\n"
    files(tmp_path, memory_max="10000\n", memory_current="9500\n", memory_stat=stat)
    assert memory.available_bytes() == 10000 - 9500 + 500
    files(tmp_path, memory_max="1000\n")
    assert memory.available_bytes() == 0, "over the limit already"
    files(tmp_path, memory_max="garbage")
    meminfo.unlink()
    assert memory.available_bytes() is None
    memory.require_host_memory(2**60, None, "a pool")


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="no /proc/meminfo here")
def test_this_machine_says_how_much_memory_it_has() -> None:
    assert 0 < (memory.available_bytes() or 0) < 2**50
