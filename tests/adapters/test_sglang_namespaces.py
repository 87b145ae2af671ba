"""Who shares pages: servers of one configuration and this package's pools, and nobody else."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.fake_sglang import (
    LAYOUTS,
    MhaHostPool,
    MlaHostPool,
    StateHostPool,
    StorageConfig,
    UnequalHostPool,
    geometry_of,
)

from hicache_storage import ConfigError, Namespace
from hicache_storage.adapters.sglang_identity import Identity, identify
from hicache_storage.adapters.sglang_namespaces import (
    flat_draft_namespace,
    pool_namespace,
    writes,
)
from hicache_storage.adapters.sglang_options import AdapterConfig
from hicache_storage.adapters.sglang_pages import host_pages
from hicache_storage.pools.device import MHADevicePool, MLADevicePool
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.ranks import Ranks

OPTIONS = AdapterConfig(model="org/model", revision="r1", draft_model="org/eagle")
OWN_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def identity(
    options: AdapterConfig = OPTIONS, arguments: Any = None, release: str = "0.0.0", **config: Any
) -> Identity:
    return identify(StorageConfig(**config), options, arguments, release)


def target(pool: Any, who: Identity | None = None) -> Namespace:
    return pool_namespace("kv", host_pages(pool), who or identity(), None)


def draft(pool: Any, of: Namespace, who: Identity | None = None) -> Namespace:
    return pool_namespace("draft", host_pages(pool), who or identity(), of)


@pytest.mark.parametrize("layout", OWN_LAYOUTS)
@pytest.mark.parametrize("kind", [MhaHostPool, MlaHostPool])
@pytest.mark.parametrize("ranks", [Ranks(), Ranks(1, 2, 1, 2, 0, 2)])
def test_a_server_and_this_packages_pools_share_target_and_draft(
    layout: Any, kind: Any, ranks: Ranks
) -> None:
    host = kind(layout, start_layer=3)
    draft_host = MhaHostPool(layout, layers=1)
    config = {
        "tp_rank": ranks.tp_rank, "tp_size": ranks.tp_size, "pp_rank": ranks.pp_rank,
        "pp_size": ranks.pp_size, "attn_cp_rank": ranks.cp_rank, "attn_cp_size": ranks.cp_size,
        "is_mla_model": kind is MlaHostPool,
    }  # fmt: skip
    who = identity(**config)
    device = MLADevicePool if kind is MlaHostPool else MHADevicePool
    pools = PairedPools(device(geometry_of(host), 4), host_pages=4, layout=layout, pin=False)
    pools.register_draft(MHADevicePool(geometry_of(draft_host), 4))
    own_target, own_draft = pools.namespaces(
        model="org/model", revision="r1", draft_model="org/eagle", ranks=ranks
    )
    found = target(host, who)
    assert found.differences(own_target) == []
    assert found.digest == own_target.digest
    assert own_draft is not None
    assert draft(draft_host, found, who).digest == own_draft.digest
    assert writes(found, who.ranks) == pools.writes_target(ranks)
    assert writes(own_draft, who.ranks) == pools.writes_draft(ranks)


def test_layouts_of_one_byte_order_share_and_others_do_not() -> None:
    digests = {layout: target(MhaHostPool(layout)).digest for layout in LAYOUTS}
    assert digests["layer_first"] == digests["page_first_direct"]
    assert len(set(digests.values())) == 3


@pytest.mark.parametrize(
    "other",
    [
        MhaHostPool(page_size=8),
        MhaHostPool(layers=4, dim=4),
        MhaHostPool(heads=4, dim=4),
        MhaHostPool(dtype=torch.float16),
        MhaHostPool(dtype=torch.float8_e4m3fn, dim=16),
        MhaHostPool(start_layer=2),
        UnequalHostPool(dim=12, v_dim=4),
        MlaHostPool(dim=32),
    ],
)
def test_pools_of_another_shape_never_meet_also_at_equal_size(other: Any) -> None:
    assert target(other).digest != target(MhaHostPool()).digest


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "org/other"}, "model"),
        ({"revision": "r2"}, "revision"),
        ({"tenant": "t"}, "tenant"),
    ],
)
def test_models_weights_and_tenants_never_meet(change: Any, named: str) -> None:
    options = {"model": "org/model", "revision": "r1", "draft_model": "org/eagle", **change}
    who = identity(AdapterConfig(**options))
    mine, other = target(MhaHostPool()), target(MhaHostPool(), who)
    assert [line.partition(":")[0] for line in mine.differences(other)] == [named]
    assert draft(MhaHostPool(), mine).digest != draft(MhaHostPool(), other, who).digest


@pytest.mark.parametrize("change", [{"draft_model": "org/x"}, {"draft_revision": "2"}])
def test_drafts_of_other_draft_weights_never_meet_and_the_target_is_shared(change: Any) -> None:
    options = {"model": "org/model", "revision": "r1", "draft_model": "org/eagle", **change}
    who = identity(AdapterConfig(**options))
    assert target(MhaHostPool(), who).digest == target(MhaHostPool()).digest
    mine, other = (draft(MhaHostPool(), target(MhaHostPool()), w) for w in (identity(), who))
    assert mine.digest != other.digest


@pytest.mark.parametrize("packed", [1, 2])
def test_draft_layers_packed_into_the_targets_pages_belong_to_its_namespace(packed: int) -> None:
    def namespace(**options: str) -> Namespace:
        pool = MhaHostPool(layers=2 + packed)
        pool.target_layer_num = 2  # type: ignore[attr-defined]
        return target(pool, identity(AdapterConfig(model="m", revision="r", **options)))

    plain = target(MhaHostPool(layers=2 + packed), identity(AdapterConfig(model="m", revision="r")))
    assert namespace(draft_model="a").digest == namespace(draft_model="a").digest
    assert namespace(draft_model="a").digest != namespace(draft_model="b").digest
    assert namespace(draft_model="a").digest != plain.digest


@pytest.mark.parametrize(
    ("kind", "tp", "pp", "cp"),
    list(itertools.product((MhaHostPool, MlaHostPool), (1, 2), (1, 2), (1, 2))),
)
def test_ranks_share_pages_exactly_where_they_hold_the_same_rows(
    kind: Any, tp: int, pp: int, cp: int
) -> None:
    owners: dict[str, list[tuple[int, int, int]]] = {}
    writers: dict[str, int] = {}
    for rank in itertools.product(range(tp), range(pp), range(cp)):
        who = identity(
            tp_rank=rank[0], tp_size=tp, pp_rank=rank[1], pp_size=pp, attn_cp_rank=rank[2],
            attn_cp_size=cp, is_mla_model=kind is MlaHostPool,
        )  # fmt: skip
        found = target(kind(start_layer=2 * rank[1]), who)
        owners.setdefault(found.digest, []).append(rank)
        writers[found.digest] = writers.get(found.digest, 0) + writes(found, who.ranks)
    shared = tp if kind is MlaHostPool else 1
    assert sorted(map(len, owners.values())) == [shared] * (tp * pp * cp // shared)
    assert set(writers.values()) == {1}


def test_data_parallel_replicas_share_pages() -> None:
    def config(rank: int) -> Any:
        return SimpleNamespace(**vars(StorageConfig()), dp_rank=rank)

    first, second = (identify(config(rank), OPTIONS, None, "") for rank in (0, 1))
    assert target(MhaHostPool(), first).digest == target(MhaHostPool(), second).digest


def test_decode_context_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match="dcp"):
        identity(dcp_size=2)


@pytest.mark.parametrize(
    ("named", "logical"),
    [
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("auto", "uint8 as auto"),
    ],
)
def test_the_logical_type_is_named_where_the_pool_keeps_bytes(named: str, logical: str) -> None:
    who = identity(arguments=SimpleNamespace(kv_cache_dtype=named))
    assert target(MhaHostPool(dtype=torch.uint8), who).dtype == logical


def test_the_device_pools_type_goes_before_the_argument() -> None:
    pool = MhaHostPool(dtype=torch.uint8)
    pool.device_pool = SimpleNamespace(dtype=torch.float8_e5m2)  # type: ignore[attr-defined]
    assert target(pool).digest == target(MhaHostPool(dtype=torch.float8_e5m2)).digest


def test_a_pool_of_unknown_shape_is_apart_by_type_size_release_and_target() -> None:
    def states(release: str, revision: str = "r1", pool: Any = None) -> str:
        options = AdapterConfig(model="m", revision=revision)
        who = identity(options, release=release)
        pages = host_pages(pool or StateHostPool())
        return pool_namespace("mamba", pages, who, target(MhaHostPool(), who)).digest

    class OtherStates(StateHostPool):
        pass

    found = [states("1"), states("2"), states("1", "r2"), states("1", pool=OtherStates())]
    assert len(set(found)) == 4
    assert states("1") == states("1")


@pytest.mark.parametrize(
    ("name", "shared"), [("mamba", False), ("indexer", True)], ids=["states", "indexer"]
)
def test_beside_an_mla_target_states_are_each_ranks_own_and_other_pools_are_shared(
    name: str, shared: bool
) -> None:
    found = []
    for rank in (0, 1):
        who = identity(tp_rank=rank, tp_size=2, is_mla_model=True)
        of = target(MlaHostPool(), who)
        found.append(pool_namespace(name, host_pages(StateHostPool()), who, of))
        assert writes(found[-1], who.ranks) is (rank == 0 or not shared)
    assert (found[0].digest == found[1].digest) is shared


def test_a_draft_of_heads_beside_an_mla_target_is_each_ranks_own() -> None:
    found = []
    for rank in (0, 1):
        who = identity(tp_rank=rank, tp_size=2, is_mla_model=True)
        of = target(MlaHostPool(), who)
        found.append(draft(MhaHostPool(layers=1), of, who))
        assert writes(of, who.ranks) is (rank == 0)
        assert writes(found[-1], who.ranks)
    assert found[0].digest != found[1].digest


def test_flat_draft_pages_of_another_size_type_or_rank_never_meet() -> None:
    def flat(size: int, dtype: torch.dtype = torch.bfloat16, **ranks: int) -> str:
        who = identity(**ranks)
        return flat_draft_namespace(size, dtype, who, target(MhaHostPool(), who)).digest

    found = [flat(256), flat(512), flat(256, torch.float16), flat(256, tp_rank=1, tp_size=2)]
    assert len(set(found)) == 4


# Model and weights


def arguments(**values: Any) -> Any:
    return SimpleNamespace(**{"model_path": "org/model", "revision": None, **values})


def test_the_model_is_what_sglang_was_started_with_not_what_it_is_served_as() -> None:
    who = identity(AdapterConfig(), arguments(), model_name="gpt-prod")
    assert who.model == "org/model"
    assert identity(AdapterConfig(model="mine"), arguments()).model == "mine"
    assert identity(AdapterConfig(), None, model_name="gpt-prod").model == "gpt-prod"
    with pytest.raises(ConfigError, match="set the option 'model'"):
        identity(AdapterConfig(), None, model_name=None)


def test_a_snapshot_in_a_hubs_cache_is_its_model_and_commit_on_every_machine() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    paths = [f"{root}/models--org--model/snapshots/{commit}" for root in ("/a/hub", "/b")]
    found = {
        (who.model, who.revision)
        for who in (identity(AdapterConfig(), arguments(model_path=path)) for path in paths)
    }
    assert found == {("org/model", commit)}


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "v2"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_scaling": {"factor": 2}}'},
        {"json_model_override_args": '{"x": "' + "y" * 5000 + '"}'},
        {"quantization_param_path": "/scales.json"},
    ],
)
def test_what_changes_the_computed_values_changes_the_namespace(change: Any) -> None:
    mine = identity(AdapterConfig(), arguments(revision="v1", json_model_override_args="{}"))
    other = identity(AdapterConfig(), arguments(**{"revision": "v1", **change}))
    assert target(MhaHostPool(), mine).digest != target(MhaHostPool(), other).digest


def test_weights_known_by_name_alone_are_said_to_be() -> None:
    assert "known by that name alone" in identity(AdapterConfig(), arguments()).doubts[0]
    assert identity(AdapterConfig(), arguments(revision="v1")).doubts == ()
    assert identity(AdapterConfig(revision="mine"), arguments()).doubts == ()


@pytest.mark.parametrize(
    ("algorithm", "drafting"), [(None, False), ("NGRAM", False), ("EAGLE3", True)]
)
def test_guessing_without_a_model_is_no_drafting(algorithm: str | None, drafting: bool) -> None:
    assert identity(arguments=arguments(speculative_algorithm=algorithm)).drafting is drafting


def test_the_drafts_identity_is_sglangs_and_else_the_targets() -> None:
    given = arguments(
        speculative_draft_model_path="org/eagle", speculative_draft_model_revision="2"
    )
    who = identity(AdapterConfig(), given)
    assert (who.draft_model, who.draft_revision) == ("org/eagle", "2")
    assert identity(AdapterConfig(), arguments()).draft_model == "org/model"
