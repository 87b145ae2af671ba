"""Who may see whose pages: only those who would read the bytes as they were meant."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import RecordingBackend

from hicache_storage import ConfigError, Namespace, PairedStore, Store
from hicache_storage.namespace import RECORD_BYTES

Hashes = Callable[[int], list[str]]

BASE: dict[str, Any] = {
    "model": "org/model",
    "pool": "mha",
    "dtype": "bfloat16",
    "page_size": 4,
    "page_bytes": 512,
    "layers": 2,
    "heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "order": "layer_token",
}
MLA = BASE | {"pool": "mla", "heads": 1, "head_dim": 32, "v_head_dim": 0}

# For every field another legal value; several where different reasons change it.
OTHERS: dict[str, list[Any]] = {
    "model": ["org/model-v2", "org-model", "org/Model", "org_model"],
    "pool": ["mla", "opaque"],
    "dtype": ["float16", "float8_e4m3fn", "float8_e5m2", "uint8"],
    "page_size": [8],
    "page_bytes": [1024],
    "layers": [1],
    "heads": [4],
    "head_dim": [4],
    "v_head_dim": [4],
    "order": ["token_layer", "opaque"],
    "revision": ["r1", "r2"],
    "first_layer": [2],
    "tenant": ["t1", "t2", " "],
    "tp_size": [2],
    "pp_size": [2],
    "cp_size": [2],
}
RANKS = ("tp_rank", "pp_rank", "cp_rank")


def variants() -> list[Namespace]:
    """The base namespace and, for every field, each of its others."""
    found = [Namespace(**BASE)]
    for name, values in OTHERS.items():
        found += [Namespace(**(BASE | {name: value})) for value in values if name != "pool"]
    found.append(Namespace(**MLA))
    found.append(Namespace(**(BASE | {"pool": "opaque"})))
    for axis in ("tp", "pp", "cp"):
        sizes = {f"{axis}_size": 2, f"{axis}_rank": 1}
        found.append(Namespace(**(BASE | sizes)))
    return found


class Client:
    """A reader and writer of one namespace in a store that it shares."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self.store, self.namespace = store, namespace

    def write(self, hashes: list[str], fill: int) -> None:
        page = bytes([fill]) * self.namespace.page_bytes
        assert self.store.batch_set(self.namespace, hashes, [page] * len(hashes)) == [True] * len(
            hashes
        )

    def read(self, page_hash: str) -> int | None:
        """The byte that fills the page, or None for a miss, which must leave no page byte."""
        buffer = bytearray([0xEE]) * self.namespace.page_bytes
        if not self.store.batch_get(self.namespace, [page_hash], [buffer])[0]:
            assert set(buffer) == {0xEE}
            return None
        (fill,) = set(buffer)
        return fill


@pytest.fixture
def store() -> Store:
    return Store(RecordingBackend())


def test_every_field_is_tried_with_another_value() -> None:
    names = {field.name for field in dataclasses.fields(Namespace)}
    assert names == set(OTHERS) | set(RANKS)


def test_namespaces_that_differ_in_any_field_never_agree() -> None:
    for writer, reader in itertools.permutations(variants(), 2):
        assert writer != reader
        assert writer.digest != reader.digest
        assert writer.differences(reader)


def test_each_client_finds_its_own_bytes_and_nobody_elses(store: Store, hashes: Hashes) -> None:
    (page_hash,) = hashes(1)
    clients = [Client(store, namespace) for namespace in variants()]
    for fill, client in enumerate(clients):
        assert client.read(page_hash) is None
        assert store.exists(client.namespace, [page_hash]) == 0
        client.write([page_hash], fill)
    assert [client.read(page_hash) for client in clients] == list(range(len(clients)))


@pytest.mark.parametrize(
    ("writer", "reader"),
    list(
        itertools.permutations(
            [
                {"dtype": "bfloat16", "head_dim": 8, "v_head_dim": 8},
                {"dtype": "float8_e4m3fn", "head_dim": 16, "v_head_dim": 16},
                {"dtype": "float8_e5m2", "head_dim": 16, "v_head_dim": 16},
                {"dtype": "uint8", "head_dim": 16, "v_head_dim": 16},
                {"dtype": "float16", "head_dim": 8, "v_head_dim": 8},
                {"dtype": "float32", "head_dim": 4, "v_head_dim": 4},
            ],
            2,
        )
    ),
)
def test_pages_of_equal_size_and_another_element_type_are_a_miss(
    store: Store, hashes: Hashes, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    (page_hash,) = hashes(1)
    Client(store, Namespace(**(BASE | writer))).write([page_hash], 1)
    assert Client(store, Namespace(**(BASE | reader))).read(page_hash) is None


def test_weights_that_change_behind_a_model_name_are_another_namespace(
    store: Store, hashes: Hashes
) -> None:
    (page_hash,) = hashes(1)
    Client(store, Namespace(**BASE, revision="r1")).write([page_hash], 1)
    for revision in ("r2", ""):
        assert Client(store, Namespace(**BASE, revision=revision)).read(page_hash) is None
    assert Client(store, Namespace(**BASE, revision="r1")).read(page_hash) == 1


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_tenants_are_apart_for_every_verb(store: Store, hashes: Hashes, warm: bool) -> None:
    pages = hashes(3)
    tenants = {tenant: Namespace(**BASE, tenant=tenant) for tenant in ("t1", "t2", "")}
    for fill, namespace in enumerate(tenants.values()):
        if warm:
            assert store.exists(namespace, pages) == 0
        Client(store, namespace).write(pages[: fill + 1], fill)
    for fill, namespace in enumerate(tenants.values()):
        assert store.exists(namespace, pages) == fill + 1
        assert Client(store, namespace).read(pages[0]) == fill
    listed = Counter(page.key.partition("/")[0] for page in store.scan())
    assert [listed[namespace.digest] for namespace in tenants.values()] == [1, 2, 3]
    assert store.namespaces() == {space.digest: space for space in tenants.values()}
    assert store.delete(tenants["t1"], pages) == [True] * 3
    assert [store.exists(namespace, pages) for namespace in tenants.values()] == [0, 2, 3]


PARALLEL = list(itertools.product([1, 2], repeat=3))


def ranks(tp: int, pp: int, cp: int) -> list[dict[str, int]]:
    """Every rank of such a deployment, as namespace fields."""
    return [
        {"tp_rank": a, "tp_size": tp, "pp_rank": b, "pp_size": pp, "cp_rank": c, "cp_size": cp}
        for a, b, c in itertools.product(range(tp), range(pp), range(cp))
    ]


@pytest.mark.parametrize("base", [BASE, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize(("tp", "pp", "cp"), PARALLEL)
def test_ranks_share_pages_exactly_where_they_hold_the_same_rows(
    store: Store, hashes: Hashes, base: dict[str, Any], tp: int, pp: int, cp: int
) -> None:
    (page_hash,) = hashes(1)

    def shard(fields: dict[str, int]) -> tuple[int, ...]:
        """What decides the bytes: of MLA, every tensor-parallel rank has the same rows."""
        tp_rank = 0 if base is MLA else fields["tp_rank"]
        return tp_rank, fields["pp_rank"], fields["cp_rank"]

    every = ranks(tp, pp, cp)
    shards = sorted({shard(fields) for fields in every})
    for fields in every:
        Client(store, Namespace(**base, **fields)).write([page_hash], shards.index(shard(fields)))
    assert len(store.namespaces()) == len(shards)
    for fields in every:
        client = Client(store, Namespace(**base, **fields))
        assert client.read(page_hash) == shards.index(shard(fields))


@pytest.mark.parametrize(("tp", "pp", "cp"), PARALLEL)
def test_deployments_of_other_sizes_share_only_a_replicated_pool(tp: int, pp: int, cp: int) -> None:
    one = {"tp_size": 1, "pp_size": 1, "cp_size": 1}
    sizes = {"tp_size": tp, "pp_size": pp, "cp_size": cp}
    assert (Namespace(**BASE, **sizes) == Namespace(**BASE, **one)) is (sizes == one)
    assert (Namespace(**MLA, **sizes) == Namespace(**MLA, **one)) is (pp == cp == 1)


@pytest.mark.parametrize("pairing", ["best_effort", "required"])
def test_a_rank_that_leaves_the_target_to_another_still_writes_its_draft_shard(
    store: Store, hashes: Hashes, pairing: Any
) -> None:
    pages = hashes(2)
    pairs = []
    for rank in range(2):
        fields = {"tp_rank": rank, "tp_size": 2}
        pairs.append(
            PairedStore(
                store,
                Namespace(**MLA, **fields),
                Namespace(**(BASE | {"model": "draft"}), **fields),
                pairing=pairing,
                writes_target=rank == 0,
            )
        )
    for rank, pair in enumerate(pairs):
        target, draft = [bytes([7 + rank]) * 512] * 2, [bytes([20 + rank]) * 512] * 2
        result = pair.batch_set(pages, target, draft)
        assert result.target == result.draft == [True, True]
    for rank, pair in enumerate(pairs):
        target_buffers, draft_buffers = ([bytearray(512), bytearray(512)] for _ in range(2))
        result = pair.batch_get(pages, target_buffers, draft_buffers)
        assert result.usable_pages == result.usable_drafts == 2
        assert [set(buffer) for buffer in target_buffers] == [{7}] * 2, "rank 0 wrote it"
        assert [set(buffer) for buffer in draft_buffers] == [{20 + rank}] * 2


def test_a_half_that_is_another_ranks_makes_no_request(hashes: Hashes) -> None:
    pages = hashes(2)
    for written in ("target", "draft"):
        backend = RecordingBackend()
        pair = PairedStore(
            Store(backend),
            Namespace(**BASE),
            Namespace(**(BASE | {"model": "draft"})),
            writes_target=written == "target",
            writes_draft=written == "draft",
        )
        result = pair.batch_set(pages, [bytes(512)] * 2, [bytes(512)] * 2)
        assert result.target == result.draft == [True, True]
        drafts = [f"d:{page}" for page in pages]
        assert backend.requests("batch_set") == [drafts if written == "draft" else pages]


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 1), (2, 2), (0, 0)])
def test_a_rank_outside_of_its_group_is_refused(axis: str, rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=axis):
        Namespace(**BASE, **{f"{axis}_rank": rank, f"{axis}_size": size})


@pytest.mark.parametrize("name", ["model", "page_size", "page_bytes", "layers"])
def test_a_namespace_without_what_it_needs_is_refused(name: str) -> None:
    empty = "" if name == "model" else 0
    with pytest.raises(ConfigError, match=name):
        Namespace(**(BASE | {name: empty}))


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@given(names, st.text(max_size=40), st.text(max_size=40))
def test_a_record_gives_the_namespace_back(model: str, revision: str, tenant: str) -> None:
    namespace = Namespace(**(BASE | {"model": model, "revision": revision, "tenant": tenant}))
    assert len(namespace.record) == RECORD_BYTES
    again = Namespace.from_record(namespace.record)
    assert again == namespace
    assert hash(again) == hash(namespace)
    assert again.differences(namespace) == []
    assert (again.model, again.revision, again.tenant) == (model, revision, tenant)


@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_names_that_differ_never_run_together(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    fields = ("model", "revision", "tenant")
    a, b = (Namespace(**(BASE | dict(zip(fields, part, strict=True)))) for part in (one, other))
    assert (a == b) is (one == other)


@pytest.mark.parametrize("model", ["org/model", "../m", "a\\b", "a:b", "x" * 134, "模型", "m\n"])
def test_no_name_given_by_a_user_reaches_the_stored_key(
    store: Store, hashes: Hashes, model: str
) -> None:
    namespace = Namespace(**(BASE | {"model": model, "tenant": "../" + model}))
    Client(store, namespace).write(hashes(1), 1)
    (page,) = store.scan()
    assert page.key == f"{namespace.digest}/{hashes(1)[0]}"


def test_a_name_that_does_not_fit_the_record_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="shorten model, revision or tenant"):
        Namespace(**(BASE | {"model": "m" * RECORD_BYTES}))


@pytest.mark.parametrize(
    "record", [b"", b"{}", b"[]", b"\xff\xfe", b'{"format_version": 1}', b'{"format_version": 99}']
)
def test_what_is_no_record_of_this_format_is_refused(record: bytes) -> None:
    with pytest.raises(ConfigError):
        Namespace.from_record(record)
