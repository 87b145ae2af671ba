"""One tensor-parallel rank of a small cache, as a process or thread of its own."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hicache.rig import SOON_S, Rig, branch, chain

from hicache_storage import BackendTimeout

LOOKUPS = 200
IN_PROCESSES = ["misses", "raises", "slow"]
"""The faults that are tried between processes too, where a collective really can hang."""
FAULTS = ["none", "misses", "raises", "slow", "loses some", "no storage", "no room", "small"]
PROMPTS = [branch(chain(3, str(i % 2)), 3, str(i)) for i in range(5)]


class ThreadRanks:
    """Agreement between threads, one a rank: the least of what all of them bring."""

    def __init__(self, ranks: int) -> None:
        self._values: list[Sequence[int]] = [()] * ranks
        self._barrier = threading.Barrier(ranks, timeout=SOON_S)
        self.rounds = [0] * ranks

    def of(self, rank: int) -> Any:
        def least(values: Sequence[int]) -> Sequence[int]:
            self._values[rank] = values
            self.rounds[rank] += 1
            self._barrier.wait()
            result = [min(each) for each in zip(*self._values, strict=True)]
            self._barrier.wait()
            return result

        return least


def make(group: Any, fault: str, **options: Any) -> Rig:
    """A rank's cache, with the fault's limits on what it has."""
    return Rig(
        device_pages=10 if fault == "small" else 14,
        host_pages=4 if fault == "small" else 16,
        group=group,
        storage={"prefetch_limit_pages": 1 if fault == "no room" else 16},
        **options,
    )


def break_storage(one: Rig, fault: str) -> None:
    """Makes storage behave as the fault says."""
    luck = random.Random(15)

    def on(hook: str, keys: list[str]) -> Any:
        if fault == "misses":
            one.backend.forget(*keys)
        elif fault == "raises" and hook != "batch_set":
            raise (
                OSError(5, "told to")
                if luck.random() < 0.5
                else BackendTimeout("told to", backend="told", operation=hook)
            )
        elif fault == "slow":
            threading.Event().wait(0.002)
        elif fault == "loses some":
            one.backend.lose = {key for key in keys if luck.random() < 0.2}

    one.backend.on = on
    if fault == "no storage":
        one.cache.detach_storage(SOON_S)


def look_up(one: Rig, seed: int, lookups: int) -> list[tuple[int, ...]]:
    """Serves requests as an engine does, the same ones on every rank; what each one got."""
    luck = random.Random(seed)
    got = []
    for i in range(lookups):
        prompt = luck.choice(PROMPTS)[: luck.randint(1, 6)]
        name = f"r{i}"
        started = one.cache.prefetch(name, prompt)
        rounds = 0
        while not one.cache.prefetch_ready(name):
            rounds += 1
            one.cache.wait_idle(0.01)
        if luck.random() < 0.1:
            one.cache.cancel_prefetch(name)
        lease = one.cache.acquire(name, prompt)
        one.check(lease)
        pages = one.cache.allocate(len(prompt) - len(lease))
        got.append((int(started), rounds, len(lease), -1 if pages is None else len(pages)))
        if pages is not None:
            one.fill(pages.tolist(), prompt[len(lease) :])
            if luck.random() < 0.5:
                one.cache.insert(lease, prompt, torch.cat([lease.device_indices, pages]))
            else:
                one.cache.free(pages)
        one.cache.release(lease)
        if luck.random() < 0.3:
            one.cache.clear()
    return got


def run(rank: int, store: str, answers: Any) -> None:
    """A process of two. For each fault it fills its storage, breaks it on rank 1, and looks
    pages up; it answers with what its requests got and how many pages it read."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    results = {}
    for fault in IN_PROCESSES:
        mine = fault if rank == 1 else "none"
        one = make(dist.group.WORLD, mine)
        for prompt in PROMPTS:
            one.keep(prompt)
            one.cache.clear()
        break_storage(one, mine)
        got = look_up(one, 3, LOOKUPS)
        one.idle()
        results[fault] = got, one.cache.stats().loaded_pages
        one.close()
    dist.destroy_process_group()
    answers.put((rank, results))
    answers.close()
    answers.join_thread()
    os._exit(0)  # as gloo's own threads now and then abort a process that ends
