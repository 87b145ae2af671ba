"""SGLang's own controller and its threads drive every backend through the adapter."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs a real SGLang wheel: make sglang")

import torch
from real_sglang.controllers import (
    HAS_DRAFT_CALLS,
    PAGE,
    RELEASE,
    Server,
    device_pool,
    hashes_of,
    set_arguments,
)

from hicache_storage import Store, open_store
from hicache_storage.adapters import sglang_identity, sglang_storage
from hicache_storage.adapters.sglang_options import AdapterConfig
from hicache_storage.pools.geometry import PageGeometry

LAYOUTS = {"mha": ("layer_first", "page_first", "page_first_direct", "page_head")}
LAYOUTS["mla"] = LAYOUTS["mha"][:3]
BACKENDS = ("file", "lmdb", "s3", "redis")
CALLS = ("flat", "in place")
MODULE = "hicache_storage.adapters.sglang"
TOKENS = list(range(100, 100 + 5 * PAGE))


def names_of(server: Server) -> tuple[str, str]:
    control = server.controller
    return control.page_get_func.__name__, control.page_set_func.__name__


CASES = [
    case
    for kind in LAYOUTS
    for case in itertools.product((kind,), LAYOUTS[kind], CALLS, BACKENDS)
    if case[3] == "file" or case[1] in ("page_first", "layer_first")
]


@pytest.mark.servers
@pytest.mark.parametrize(("kind", "layout", "calls", "backend"), CASES)
def test_pages_come_back_after_a_restart(
    serve: Any, store_url: Any, kind: str, layout: str, calls: str, backend: str
) -> None:
    url = store_url(backend)
    before = serve(url, calls=calls, kind=kind, layout=layout)
    before.fill(1)
    written, stored = before.write(TOKENS)
    assert stored == len(TOKENS)
    wanted = before.pages(written)
    before.stop()
    after = serve(url, calls=calls, kind=kind, layout=layout)
    read, came = after.prefetch(TOKENS)
    assert came == len(TOKENS)
    assert after.pages(read) == wanted
    assert after.threads_alive()


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS["mha"])
def test_every_call_gives_the_same_object(
    serve: Any, store_url: Any, kind: str, layout: str
) -> None:
    if layout not in LAYOUTS[kind]:
        pytest.skip("SGLang has no such pool")
    url = store_url("file")
    for writer, reader in itertools.permutations(CALLS, 2):
        tokens = [token + 1000 * (writer == "flat") for token in TOKENS]
        first = serve(url, calls=writer, kind=kind, layout=layout)
        first.fill(2)
        written, stored = first.write(tokens)
        second = serve(url, calls=reader, kind=kind, layout=layout)
        read, came = second.prefetch(tokens)
        assert (stored, came) == (len(tokens), len(tokens))
        assert second.pages(read) == first.pages(written)


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_server_and_this_packages_pools_read_each_others_pages(
    serve: Any, store_url: Any, kind: str, layout: Any
) -> None:
    from hicache_storage.pools.host import HostPool

    url = store_url("file")
    server = serve(url, kind=kind, layout=layout)
    server.fill(3)
    written, _ = server.write(TOKENS)
    heads, dim = (2, 8) if kind == "mha" else (1, 16)
    geometry = PageGeometry(
        "mha" if kind == "mha" else "mla", 2, heads, dim, dim if kind == "mha" else 0, PAGE,
        torch.bfloat16,
    )  # fmt: skip
    own = HostPool(geometry, 8, layout, pin=False)
    namespace = geometry.namespace(model="dummy", revision="r1", order=own.order)
    with open_store(url) as store:
        hits = store.batch_get(namespace, hashes_of(TOKENS), [own.spans(i) for i in range(5)])
        assert hits == [True] * 5
        assert [b"".join(own.spans(i)) for i in range(5)] == server.pages(written)
        other = [token + 500 for token in TOKENS]
        assert store.batch_set(namespace, hashes_of(other), [own.spans(i) for i in range(5)])
    read, came = server.prefetch(other)
    assert came == len(other)
    assert server.pages(read) == server.pages(written)


def test_named_backends_have_the_calls_in_place_and_names_of_their_own(
    store_url: Any, serve: Any
) -> None:
    server = serve(store_url("lmdb"))
    assert names_of(server) == ("_page_get_zero_copy", "_page_set_zero_copy")
    assert type(server.storage).__name__ == "HiCacheLmdb"


@pytest.mark.parametrize("interface_v1", [0, 1])
def test_the_dynamic_route_does_the_same(rank: Any, store_url: Any, interface_v1: int) -> None:
    set_arguments()
    config = {
        "backend_name": "own", "module_path": MODULE, "class_name": "HiCacheStore",
        "interface_v1": interface_v1, "url": store_url("file"),
    }  # fmt: skip
    server = Server("dynamic", config)
    try:
        server.fill(4)
        written, stored = server.write(TOKENS)
        read, came = server.prefetch(TOKENS)
        assert (stored, came) == (len(TOKENS), len(TOKENS))
        assert server.pages(read) == server.pages(written)
        assert type(server.storage).__name__ == "HiCacheFiles"
    finally:
        server.stop()


def test_servers_of_another_configuration_never_meet(serve: Any, store_url: Any) -> None:
    url = store_url("file")
    first = serve(url)
    first.fill(5)
    first.write(TOKENS)
    same = [serve(url, layout="page_first")]
    others = [
        serve(url, layout="page_first_direct"),
        serve(url, kind="mla"),
        serve(url, dtype=torch.float16),
        serve(url, {"tenant": "t"}),
        serve(url, {"revision": "r2"}),
        serve(url, {"model": "org/other"}),
    ]
    assert [server.prefetch(TOKENS)[1] for server in same] == [len(TOKENS)]
    assert [server.prefetch(TOKENS)[1] for server in others] == [0] * len(others)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_ranks_keep_their_own_shards_and_share_what_is_the_same(
    serve: Any, store_url: Any, rank: Any, kind: str
) -> None:
    url = store_url("file")
    written = []
    for tp_rank in (0, 1):
        rank(tp_rank=tp_rank, tp_size=2)
        server = serve(url, kind=kind)
        server.fill(10 + tp_rank)
        indices, _ = server.write(TOKENS)
        written.append(server.pages(indices))
        assert server.threads_alive()
    for tp_rank in (0, 1):
        rank(tp_rank=tp_rank, tp_size=2)
        server = serve(url, kind=kind)
        read, came = server.prefetch(TOKENS)
        assert came == len(TOKENS)
        assert server.pages(read) == written[tp_rank if kind == "mha" else 0]


def test_pages_of_the_other_pipeline_stage_are_never_read(
    serve: Any, store_url: Any, rank: Any
) -> None:
    url = store_url("file")
    rank(pp_rank=0, pp_size=2)
    first = serve(url, kind="mla")
    if RELEASE < (0, 5, 13):
        first.stop()
        first.controller.pp_rank, first.controller.pp_size = 0, 2
        first.attach()
    first.fill(1)
    first.write(TOKENS)
    rank(pp_rank=1, pp_size=2)
    second = serve(url, kind="mla")
    if RELEASE < (0, 5, 13):
        second.stop()
        second.controller.pp_rank, second.controller.pp_size = 1, 2
        second.attach()
    assert second.prefetch(TOKENS)[1] == 0
    assert second.storage.server.identity.ranks.pp_rank == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_pages_are_apart_by_their_logical_type(
    serve: Any, store_url: Any, dtype: torch.dtype
) -> None:
    named = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}[dtype]
    set_arguments(kv_cache_dtype=named)
    assert device_pool("mha", dtype=dtype).store_dtype == torch.uint8
    server = serve(store_url("file"), dtype=dtype)
    assert server.storage.server.target.namespace.dtype == str(dtype).removeprefix("torch.")


def test_detach_closes_the_store_and_attach_opens_it_again(serve: Any, store_url: Any) -> None:
    server = serve(store_url("lmdb"))
    server.fill(1)
    written, _ = server.write(TOKENS)
    wanted = server.pages(written)
    store: Store = server.storage.server.store
    server.stop()
    assert "closed" in repr(store)
    server.attach()
    read, came = server.prefetch(TOKENS)
    assert came == len(TOKENS)
    assert server.pages(read) == wanted


def test_an_attachment_that_fails_says_why_and_leaves_nothing_open(
    serve: Any, store_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(store_url("file"), attach=False)
    server._config["pairng"] = "x"
    with pytest.raises(ValueError, match="did you mean 'pairing'"):
        server.attach()
    del server._config["pairng"]
    opened: list[Any] = []
    real = sglang_storage.open_store

    def watched(*args: Any, **kwargs: Any) -> Any:
        opened.append(real(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(sglang_storage, "open_store", watched)
    buffer, server.host.kv_buffer = server.host.kv_buffer, None
    with pytest.raises(ValueError, match="no memory of its own"):
        server.attach()
    assert "closed" in repr(opened[0])
    server.host.kv_buffer = buffer
    server.attach()
    server.fill(1)
    assert server.write(TOKENS)[1] == server.prefetch(TOKENS)[1] == len(TOKENS)


def test_the_controllers_draft_calls_are_there_where_they_are_expected() -> None:
    assert ((0, 5, 11) <= RELEASE < (0, 5, 19)) == HAS_DRAFT_CALLS


def test_the_arguments_that_tell_a_server_from_another_are_there(rank: Any) -> None:
    set_arguments(
        revision="v1",
        quantization="fp8",
        kv_cache_dtype="fp8_e5m2",
        json_model_override_args='{"a": 1}',
    )
    found = sglang_identity.server_arguments()
    for name in (
        "model_path", "revision", "quantization", "json_model_override_args", "kv_cache_dtype",
        "speculative_algorithm", "speculative_draft_model_path",
        "speculative_draft_model_revision", "enable_lora",
    ):  # fmt: skip
        assert hasattr(found, name), name
    who = sglang_identity.identify(SimpleNamespace(), AdapterConfig(), found)
    assert (who.model, who.kv_cache_dtype, who.drafting) == ("dummy", "fp8_e5m2", False)
    assert who.revision == 'v1 quantization=fp8 json_model_override_args={"a": 1}'


def test_sglangs_metrics_take_what_the_storage_moved(serve: Any, store_url: Any) -> None:
    from sglang.srt.observability.metrics_collector import StorageMetrics

    server = serve(store_url("file"), attach=False)
    server.controller.enable_storage_metrics = True
    server.attach()
    server.fill(1)
    server.write(TOKENS)
    server.prefetch(TOKENS)
    found = server.storage.get_stats()
    assert isinstance(found, StorageMetrics)
    assert (found.backup_pgs, found.prefetch_pgs) == ([5], [5])
