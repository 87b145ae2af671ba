"""Ranks agree: each enters the same collectives, and all go on with what the least has."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hicache import ranks
from hicache.rig import SOON_S, Rig, ToldBackend, chain

from hicache_storage import ConfigError, PairedStore, Store
from hicache_storage.hicache import HiCache
from hicache_storage.hicache.agreement import Agreement
from hicache_storage.pools.device import DevicePool, MHADevicePool, MLADevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.ranks import Ranks

MakeRig = Callable[..., Rig]


@pytest.mark.slow
def test_two_processes_give_the_same_answers_whatever_one_of_them_suffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    processes = [
        context.Process(target=ranks.run, args=(rank, str(tmp_path / "ranks"), answers))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        (_, sound), (_, faulty) = sorted(answers.get(timeout=200) for _ in processes)
    finally:
        for process in processes:
            process.join(SOON_S)
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    for fault in ranks.IN_PROCESSES:
        (got, loaded), (other, other_loaded) = sound[fault], faulty[fault]
        assert got == other, fault
        assert len(got) == ranks.LOOKUPS
        assert loaded > 0, "rank 0 has everything"
        assert (other_loaded == 0) == (fault in ("misses", "raises")), fault


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(work)

    def call(i: int) -> None:
        try:
            results[i] = work[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("call", ["acquire", "allocate"])
def test_an_error_on_one_rank_does_not_leave_the_others_waiting(rig: MakeRig, call: str) -> None:
    agreement = ranks.ThreadRanks(2)
    pair = [rig(group=agreement.of(rank), store=False) for rank in range(2)]

    def fail(count: int) -> list[int]:
        raise RuntimeError("device fault")

    pair[1].cache._levels.take_device = fail  # type: ignore[method-assign]
    first, second = in_threads(
        *(
            (lambda one=one: one.cache.acquire("r", chain(2)))
            if call == "acquire"
            else (lambda one=one: one.cache.allocate(2))
            for one in pair
        )
    )
    assert isinstance(second, RuntimeError)
    assert first is None if call == "allocate" else len(first) == 0
    assert agreement.rounds == [1, 1]
    assert pair[0].pools.device_allocator.available == 32


def test_a_page_that_one_rank_lost_is_used_on_none(rig: MakeRig) -> None:
    hashes = chain(4)
    agreement = ranks.ThreadRanks(2)
    pair = [rig(group=agreement.of(rank)) for rank in range(2)]
    in_threads(*(lambda one=one: one.keep(hashes) for one in pair))
    for one in pair:
        one.cache.clear()
    pair[1].backend.forget(hashes[2])
    found = in_threads(*(lambda one=one: one.pairs().exists(hashes).usable for one in pair))
    assert found == [4, 2]
    leases = in_threads(*(lambda one=one: one.fetch(hashes) for one in pair))
    assert [len(lease) for lease in leases] == [2, 2]
    published = [one.cache.stats().published_pages for one in pair]
    assert published == [2, 2]
    for one, lease in zip(pair, leases, strict=True):
        one.cache.release(lease)
        one.settle()


@pytest.mark.parametrize("fault", ranks.FAULTS)
def test_every_rank_enters_as_many_collectives_as_the_others(fault: str) -> None:
    agreement = ranks.ThreadRanks(3)
    trio = [
        ranks.make(agreement.of(rank), fault if rank == 1 else "none", prefetch_policy=policy)
        for rank, policy in enumerate(["best_effort", "wait_complete", "timeout"])
    ]
    in_threads(*(lambda one=one: [one.keep(prompt) for prompt in ranks.PROMPTS] for one in trio))
    for rank, one in enumerate(trio):
        one.cache.clear()
        ranks.break_storage(one, fault if rank == 1 else "none")
    got = in_threads(*(lambda one=one: ranks.look_up(one, 4, 60) for one in trio))
    assert got[0] == got[1] == got[2]
    assert len(got[0]) == 60
    assert len(set(agreement.rounds)) == 1
    for one in trio:
        one.close()


def test_a_group_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="got str"):
        Agreement("gloo")  # type: ignore[arg-type]


def test_a_single_rank_agrees_with_itself() -> None:
    alone = Agreement(None)
    assert [alone.least(value) for value in (-1, 0, 5)] == [-1, 0, 5]
    assert alone.any(True)
    assert not alone.any(False)


@pytest.mark.parametrize(
    ("target", "draft", "written"),
    [
        pytest.param("mla", None, False, id="latent rows: rank 0 writes for all"),
        pytest.param("mla", "mla", False, id="latent target and draft"),
        pytest.param("mla", "mha", True, id="its own shard of the draft"),
        pytest.param("mha", "mla", True, id="its own shard of the target"),
        pytest.param("mha", None, True, id="its own shard"),
    ],
)
def test_pages_that_all_ranks_have_are_written_by_one(
    target: str, draft: str | None, written: bool
) -> None:
    pools = PairedPools(_pool(target), host_pages=8)
    pools.register_draft(None if draft is None else _pool(draft))
    for tp_rank in range(2):
        place, backend, cache = Ranks(tp_rank=tp_rank, tp_size=2), ToldBackend(), HiCache(pools)
        namespaces = pools.namespaces(model="m", draft_model="d", ranks=place)
        cache.attach_storage(PairedStore(Store(backend), *namespaces), ranks=place)
        lease = cache.acquire("r", [])
        pages = cache.allocate(2)
        assert pages is not None
        cache.insert(lease, chain(2), pages)
        cache.release(lease)
        assert cache.close(SOON_S) == 0
        assert (backend.stored() != set()) is (tp_rank == 0 or written)
        cache.clear()


def _pool(kind: str) -> DevicePool:
    if kind == "mla":
        return MLADevicePool(PageGeometry("mla", 1, 1, 16, 0, 4, torch.bfloat16), 8)
    return MHADevicePool(PageGeometry("mha", 1, 2, 8, 8, 4, torch.bfloat16), 8)
