"""SGLang's other host pools: read and written in place wherever their pages can be shown so."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs a real SGLang wheel: make sglang")

import torch
from real_sglang.controllers import PAGE, TOKENS

from hicache_storage import ConfigError
from hicache_storage.adapters.sglang_identity import Identity
from hicache_storage.adapters.sglang_namespaces import pool_namespace
from hicache_storage.adapters.sglang_pages import HostPages, host_pages
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.ranks import Ranks

IDENTITY = Identity("m", "1", "m", "", "", Ranks(), False, "auto", "0", False)
LAYOUTS = ("page_first", "page_first_direct")


def check_pages(pool: Any, *, in_place: bool) -> HostPages:
    """Writes and reads pages through spans, and compares them with SGLang's flat pages."""
    for value in vars(pool).values():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.bfloat16, torch.uint8):
                tensor.view(torch.uint8).random_(0, 60)
    pages = host_pages(pool)
    assert pages.in_place is in_place
    for page in (0, 2, pages.num_pages - 1):
        (spans,) = pages.to_write([page])
        assert b"".join(spans) == flat(pool, page * pages.page_size)
    (source,) = pages.to_write([2])
    wanted = b"".join(source)
    (target,), finish = pages.to_read([1])
    position = 0
    for span in target:
        span[:] = wanted[position : position + len(span)]
        position += len(span)
    finish([True])
    assert flat(pool, pages.page_size) == wanted
    return pages


def flat(pool: Any, index: int) -> bytes:
    try:
        page = pool.get_data_page(index, flat=True)
    except NotImplementedError:  # K and V of unequal width
        rows = slice(index // PAGE, index // PAGE + 1)
        if pool.layout == "page_first":
            rows = slice(index, index + PAGE)
        page = torch.cat([part[rows].flatten() for part in (pool.k_buffer, pool.v_buffer)])
    return bytes(page.contiguous().view(torch.uint8).numpy().data)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_of_unequal_width(layout: str) -> None:
    mha = pytest.importorskip("sglang.srt.mem_cache.pool_host.mha")
    if not hasattr(mha, "AsymmetricMHATokenToKVPoolHost"):
        pytest.skip("this release has no such pool")
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    device = MHATokenToKVPool(
        size=TOKENS, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=8, v_head_dim=4,
        layer_num=2, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    more: dict[str, Any] = {}
    first: Any = device
    if hasattr(device, "get_device_pool_infos"):
        first = device.get_device_pool_infos()[0].buffer_info
        more = {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": 2}
    try:
        pool = mha.AsymmetricMHATokenToKVPoolHost(
            first, 2.0, 0, PAGE, layout, pin_memory=False, device="cpu", **more
        )
    except TypeError as error:
        pytest.skip(f"made in another way in this release: {error}")
    pages = check_pages(pool, in_place=True)
    geometry = PageGeometry("mha", 2, 2, 8, 4, PAGE, torch.bfloat16)
    order = "token_layer" if layout == "page_first" else "layer_token"
    mine = geometry.namespace(model="m", revision="1", order=order)  # type: ignore[arg-type]
    assert pool_namespace("kv", pages, IDENTITY, None).differences(mine) == []


@pytest.mark.parametrize("side_state", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_mamba(layout: str, side_state: bool) -> None:
    module = pytest.importorskip("sglang.srt.mem_cache.pool_host.mamba")
    infos = pytest.importorskip("sglang.srt.mem_cache.device_pool_info")
    if not hasattr(infos, "MambaStateBufferInfo"):
        pytest.skip("made in another way in this release")
    slots = 8
    extra = (torch.zeros(slots, 3, dtype=torch.bfloat16),) if side_state else ()
    info = infos.MambaStateBufferInfo(
        temporal=torch.zeros(3, slots, 2, 5, dtype=torch.bfloat16),
        conv=(torch.zeros(3, slots, 7, 2, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=extra,
    )
    pool = module.MambaPoolHost(
        info, 2.0, 0, device_capacity=slots, pin_memory=False, device="cpu", layout=layout
    )
    # With states beside, a page has no addresses in this release.
    pages = check_pages(pool, in_place=not side_state)
    assert pool_namespace("mamba", pages, IDENTITY, None).pool == "opaque"


@pytest.mark.parametrize("layout", ["layer_first", *LAYOUTS])
def test_paged_side_pools_of_compressed_attention(layout: str) -> None:
    module = pytest.importorskip("sglang.srt.mem_cache.memory_pool_host")
    if not hasattr(module, "DeepSeekV4PagedHostPool"):
        pytest.skip("this release has no such pool")
    buffers = [torch.zeros(8, 96, dtype=torch.uint8) for _ in range(3)]
    try:
        pool = module.DeepSeekV4PagedHostPool(
            "side", buffers, 96, 8, PAGE, layout=layout, pin_memory=False
        )
    except TypeError as error:
        pytest.skip(f"made in another way in this release: {error}")
    check_pages(pool, in_place=True)


def test_a_pool_of_slots_only_is_refused() -> None:
    module = pytest.importorskip("sglang.srt.mem_cache.memory_pool_host")
    if not hasattr(module, "LogicalHostPool"):
        pytest.skip("this release has no such pool")
    with pytest.raises(ConfigError, match="LogicalHostPool has no memory of its own"):
        host_pages(module.LogicalHostPool(TOKENS, PAGE))
