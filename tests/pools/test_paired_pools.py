"""PairedPools: a draft rides along with its target, or is left out cleanly."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from pools.pool_cases import (
    MHA,
    MLA,
    POISON,
    device_pool,
    fill,
    fill_random,
    host_page,
    page_bytes,
    poison,
    slots,
)

from hicache_storage import ConfigError, Namespace, PageSizeMismatch
from hicache_storage.pools import memory
from hicache_storage.pools import paired as paired_module
from hicache_storage.pools.device import DevicePool, HybridDevicePool, MHADevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.ranks import Ranks

PAGES = 16


def paired(
    target: PageGeometry = MHA, draft: PageGeometry | None = MLA, layout: Layout = "page_first"
) -> PairedPools:
    """Pools of random bytes; the host slots are poisoned."""
    pools = PairedPools(device_pool(target, PAGES), host_pages=8, layout=layout)
    fill_random(pools.device, 1)
    poison(pools.host)
    if draft is not None:
        assert pools.register_draft(device_pool(draft, PAGES)) is True
        assert pools.draft_device is not None
        assert pools.draft_host is not None
        fill_random(pools.draft_device, 2)
        poison(pools.draft_host)
    return pools


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (MHA, MHA),
        (MHA, MLA),
        (MLA, MHA),
        (MLA, MLA),
        (MHA, replace(MHA, layers=1, dtype=torch.float8_e5m2, v_head_dim=6)),
        (MHA, replace(MHA, layers=4)),
    ],
)
def test_target_and_draft_move_under_the_same_indices(
    target: PageGeometry, draft: PageGeometry, layout: Layout
) -> None:
    pools = paired(target, draft, layout)
    assert pools.draft_device is not None
    halves = [(pools.device, pools.host), (pools.draft_device, pools.draft_host)]
    expected = [
        [page_bytes(device, page, pools.host.order) for page in (12, 3)] for device, _ in halves
    ]
    pools.backup(slots([12, 3]), slots([0, 7])).wait()
    for device, _ in halves:
        fill(device, 0xEE)
    pools.load_back(slots([0, 7]), slots([5, 15])).synchronize()
    for (device, host), pages in zip(halves, expected, strict=True):
        assert host is not None
        assert [host_page(host, slot) for slot in (0, 7)] == pages
        assert [page_bytes(device, page, host.order) for page in (5, 15)] == pages
        assert set(page_bytes(device, 12, host.order)) == {0xEE}
        assert set(host_page(host, 1)) == {POISON}


def test_the_draft_gets_a_host_pool_of_its_own_kind_with_as_many_slots() -> None:
    pools = paired()
    assert pools.draft_host is not None
    assert pools.draft_host.geometry == MLA
    assert pools.draft_host.num_pages == pools.host.num_pages == 8
    assert pools.draft_host.layout == pools.host.layout
    assert pools.host_allocator.available == 8
    assert pools.device_allocator.available == PAGES


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_the_layers_of_a_draft_are_counted_from_its_pool(layers: int) -> None:
    pools = paired(draft=replace(MHA, layers=layers))
    assert pools.draft_host is not None
    assert pools.draft_host.geometry.page_bytes == 256 * layers
    _, draft = pools.namespaces(model="m", draft_model="d")
    assert draft is not None
    assert (draft.layers, draft.page_bytes) == (layers, 256 * layers)


def nothing(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


@pytest.mark.parametrize("none", [None, [], ()])
def test_without_a_draft_model_everything_works_without_drafts(
    none: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No speculation, or n-gram speculation: there is no draft pool."""
    pools = paired(draft=None)
    with caplog.at_level(logging.INFO):
        assert pools.register_draft(none) is False
    assert len(nothing(caplog, logging.INFO)) == 1
    assert not nothing(caplog, logging.WARNING)
    expect_target_only(pools)


def expect_target_only(pools: PairedPools) -> None:
    assert pools.draft_device is None
    assert pools.draft_host is None
    assert pools.draft_spans(slots([0])) is None
    pools.zero_draft(slots([0]))
    assert pools.namespaces(model="m", draft_model="d")[1] is None
    assert pools.writes_draft(Ranks()) is False
    expected = page_bytes(pools.device, 3, pools.host.order)
    pools.backup(slots([3]), slots([1])).wait()
    pools.load_back(slots([1]), slots([9])).synchronize()
    assert page_bytes(pools.device, 9, pools.host.order) == expected


@pytest.mark.parametrize(
    "unsupported",
    [object(), SimpleNamespace(size=0, kv_buffer=None), [object(), object()], "ngram"],
    ids=["object", "duck", "list", "text"],
)
def test_a_draft_pool_of_an_unknown_type_is_one_warning_and_nothing_else(
    unsupported: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pools = paired(draft=None)
    with caplog.at_level(logging.INFO):
        assert pools.register_draft(unsupported) is False
        assert pools.register_draft(unsupported) is False
    (warning,) = nothing(caplog, logging.INFO)
    name = type(unsupported[0] if isinstance(unsupported, list) else unsupported).__name__
    assert f"type {name} are not supported" in warning
    expect_target_only(pools)
    assert pools.register_draft(device_pool(MLA, PAGES)) is True, "a supported one may follow"


def test_of_several_eagle_layers_the_first_ones_pool_is_used() -> None:
    for kind in (list, tuple):
        pools = paired(draft=None)
        layers = kind(device_pool(replace(MHA, layers=1), PAGES) for _ in range(3))
        assert pools.register_draft(layers) is True
        assert pools.draft_device is layers[0]


def test_of_a_hybrid_target_or_draft_the_full_attention_part_is_paged() -> None:
    full, draft = device_pool(MHA, PAGES), device_pool(MLA, PAGES)
    pools = PairedPools(HybridDevicePool(full, [0, 5]), host_pages=4)
    assert pools.device is full
    assert pools.register_draft(HybridDevicePool(draft, [0, 3])) is True
    assert pools.draft_device is draft


@pytest.mark.parametrize(
    ("draft", "pages", "found", "ours"),
    [
        (MLA, 8, "num_pages 8", "num_pages 16"),
        (MLA, 17, "num_pages 17", "num_pages 16"),
        (replace(MLA, page_size=8), 16, "page_size 8", "page_size 4"),
        (replace(MLA, page_size=1), 16, "page_size 1", "page_size 4"),
        (replace(MLA, page_size=2), 32, "page_size 2", "page_size 4"),
    ],
)
def test_a_draft_pool_with_other_slots_is_refused_at_registration(
    draft: PageGeometry, pages: int, found: str, ours: str
) -> None:
    pools = paired(draft=None)
    with pytest.raises(ConfigError) as refused:
        pools.register_draft(device_pool(draft, pages))
    assert f"draft pool (MLADevicePool) has {found}" in str(refused.value)
    assert f"target pool (MHADevicePool) has {ours}" in str(refused.value)
    expect_target_only(pools)


def test_a_second_draft_is_refused_and_the_first_one_stays() -> None:
    pools = paired()
    first = pools.draft_device
    with pytest.raises(ConfigError, match="registered already"):
        pools.register_draft(device_pool(MLA, PAGES))
    assert pools.draft_device is first


def test_a_draft_that_could_not_be_registered_is_none() -> None:
    """It may be tried again."""
    pools = PairedPools(device_pool(MHA, PAGES), host_pages=PAGES)
    draft = device_pool(replace(MHA, layers=1), PAGES)
    for part in ("Ends", "HostPool"):
        with (
            mock.patch.object(paired_module, part, side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            pools.register_draft(draft)
        assert pools.draft_host is None
        assert pools.draft_device is None
        assert pools.draft_spans(slots([0])) is None
    assert pools.register_draft(draft)
    assert pools.draft_spans(slots([0])) is not None


def test_a_draft_is_registered_before_host_pages_are_used() -> None:
    pools = paired(draft=None)
    taken = pools.host_allocator.alloc(1)
    assert taken is not None
    with pytest.raises(ConfigError, match="before host pages are used"):
        pools.register_draft(device_pool(MLA, PAGES))
    pools.host_allocator.free(taken)
    assert pools.register_draft(device_pool(MLA, PAGES)) is True


class LogicalPool(DevicePool):
    """A pool that only refers to another: it has a geometry, and no memory of its own."""

    def __init__(self, pages: int, tensors: Any) -> None:
        self.geometry, self.num_pages, self._tensors = MHA, pages, tensors
        self.device = torch.device("cpu")


def freed_pool() -> DevicePool:
    pool = device_pool(MHA, PAGES)
    pool.layer_tensors(1)[1].untyped_storage().resize_(0)
    return pool


@pytest.mark.parametrize(
    ("pool", "match"),
    [
        (LogicalPool(0, ()), r"\(LogicalPool\) has 0 pages"),
        (LogicalPool(PAGES, ()), r"\(LogicalPool\) has tensors for 0 layers"),
        (LogicalPool(PAGES, ((None, None), (None, None))), r"\(LogicalPool\).*no tensor"),
        (freed_pool(), r"\(MHADevicePool\): layer 0.*without memory behind it"),
    ],
    ids=["no pages", "no layers", "no tensors", "freed"],
)
def test_a_pool_without_physical_storage_is_refused_by_name(pool: DevicePool, match: str) -> None:
    with pytest.raises(ConfigError, match=f"target pool {match}"):
        PairedPools(pool, host_pages=4)
    pools = paired(draft=None)
    with pytest.raises(ConfigError, match=f"draft pool {match}"):
        pools.register_draft(pool)
    expect_target_only(pools)


@pytest.mark.parametrize("pool", [None, object(), SimpleNamespace(size_per_token=0)])
def test_a_target_of_an_unknown_type_is_refused_by_name(pool: Any) -> None:
    with pytest.raises(ConfigError, match=f"target pool of type {type(pool).__name__} is not"):
        PairedPools(pool, host_pages=4)


@pytest.mark.parametrize(
    ("host_pages", "target_fits", "pair_fits"),
    [(10, True, True), (11, True, False), (15, True, False), (16, False, False)],
)
def test_more_host_memory_than_there_is_is_refused(
    monkeypatch: pytest.MonkeyPatch, host_pages: int, target_fits: bool, pair_fits: bool
) -> None:
    """15 target pages of 512 bytes are available: 10 pairs with drafts of 256 bytes."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 15 * 512)
    if not target_fits:
        with pytest.raises(ConfigError, match=r"a host pool of 16 pages needs .* lower host_p"):
            PairedPools(device_pool(MHA, PAGES), host_pages=host_pages)
        return
    pools = PairedPools(device_pool(MHA, PAGES), host_pages=host_pages)
    draft = device_pool(MLA, PAGES)
    if pair_fits:
        assert pools.register_draft(draft) is True
        return
    with pytest.raises(ConfigError, match=r"of target and draft needs .* lower host_pages"):
        pools.register_draft(draft)
    assert pools.draft_host is None


def test_memory_that_others_took_meanwhile_is_not_promised_to_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = PairedPools(device_pool(MHA, PAGES), host_pages=4)
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * 256 - 1)
    with pytest.raises(ConfigError, match="the draft's part needs"):
        pools.register_draft(device_pool(MLA, PAGES))


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize("slot_count", [8, 11])
def test_three_pages_and_a_token_count_of_slots_are_refused(
    with_draft: bool, slot_count: int
) -> None:
    """Token indices instead of page indices, whole pages of them or not."""
    pools = paired(draft=MLA if with_draft else None)
    host, device = slots([0, 1, 2]), slots(range(slot_count))
    with pytest.raises(PageSizeMismatch):
        pools.backup(device, host)
    with pytest.raises(PageSizeMismatch):
        pools.load_back(host, device)
    with pytest.raises(PageSizeMismatch):
        pools.target_spans(slots([0, 8]))
    assert all(set(host_page(pools.host, page)) == {POISON} for page in range(8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_draft_is_zeroed(layout: Layout) -> None:
    pools = paired(layout=layout)
    assert pools.draft_host is not None
    pools.zero_draft(slots([2, 5]))
    for page in range(8):
        assert set(host_page(pools.host, page)) == {POISON}
        assert set(host_page(pools.draft_host, page)) == ({0} if page in (2, 5) else {POISON})


def test_namespaces_are_those_of_the_two_pools() -> None:
    pools = paired(MHA, replace(MLA, layers=1), "page_first_direct")
    target, draft = pools.namespaces(
        model="m", revision="r", draft_model="d", draft_revision="e", tenant="t"
    )
    assert draft is not None
    assert (target.pool, target.model, target.revision, target.tenant) == ("mha", "m", "r", "t")
    assert (draft.pool, draft.model, draft.layers, draft.tenant) == ("mla", "d", 1, "t")
    assert target.order == draft.order == "layer_token"
    for part in ("'e'", "'m'", "'r'"):
        assert part in draft.revision


def test_namespaces_follow_the_order_of_the_layout() -> None:
    spaces = {
        layout: paired(layout=layout).namespaces(model="m", draft_model="d") for layout in LAYOUTS
    }
    assert spaces["layer_first"] == spaces["page_first_direct"]
    for half in (0, 1):
        assert spaces["page_first"][half] != spaces["layer_first"][half]


def test_a_draft_without_a_name_has_no_namespace() -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        paired().namespaces(model="m")


@pytest.mark.parametrize("target", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("draft", [MHA, MLA], ids=["mha", "mla"])
def test_every_rank_writes_what_no_other_rank_has(
    target: PageGeometry, draft: PageGeometry
) -> None:
    """Each shard of each half has exactly one writer, in every combination of ranks."""
    pools = paired(target, draft)
    for tp, pp, cp in [(2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 2, 2)]:
        written: list[list[Namespace]] = [[], []]
        every: list[set[Namespace]] = [set(), set()]
        for a in range(tp):
            for b in range(pp):
                for c in range(cp):
                    ranks = Ranks(a, tp, b, pp, c, cp)
                    halves = pools.namespaces(model="m", draft_model="d", ranks=ranks)
                    writes = (pools.writes_target(ranks), pools.writes_draft(ranks))
                    for half, (space, mine) in enumerate(zip(halves, writes, strict=True)):
                        assert space is not None
                        every[half].add(space)
                        if mine:
                            written[half].append(space)
        for half in (0, 1):
            assert len(written[half]) == len(set(written[half])), "two ranks write one page"
            assert set(written[half]) == every[half], "nobody writes a page"


def test_a_rank_without_the_target_writes_its_own_draft_shard() -> None:
    pools = paired(MLA, MHA)
    rank = Ranks(tp_rank=1, tp_size=2)
    assert (pools.writes_target(rank), pools.writes_draft(rank)) == (False, True)


@pytest.mark.parametrize("ranks", [(1, 1), (-1, 2), (2, 2)])
def test_a_rank_outside_of_its_group_is_refused(ranks: tuple[int, int]) -> None:
    for place in range(3):
        with pytest.raises(ConfigError, match="is not below"):
            Ranks(*([0, 1] * place), *ranks)


def test_the_geometry_of_float8_kept_as_bytes_reaches_the_namespace() -> None:
    stored = [torch.zeros(64, 2, 8, dtype=torch.uint8) for _ in range(2)]
    spaces = []
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8):
        pool = MHADevicePool.from_tensors(stored, stored, 4, dtype=dtype)
        spaces.append(PairedPools(pool, host_pages=2).namespaces(model="m")[0])
    assert len(set(spaces)) == 3
    assert len({space.page_bytes for space in spaces}) == 1
