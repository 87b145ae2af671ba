"""Random use of a small HiCache: every page handed out is the page of its hash, and no slot is
lost or given twice, whatever the order of calls and faults."""

from __future__ import annotations

import random
import time

import torch
from hicache.rig import Rig, ToldBackend, branch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_storage import BackendUnavailable
from hicache_storage.hicache import Lease

PROMPTS = st.lists(st.sampled_from("aaab"), min_size=1, max_size=6)


def hashes_of(letters: list[str]) -> list[str]:
    hashes: list[str] = []
    for letter in letters:
        hashes = branch(hashes, 1, letter)
    return hashes


class CacheMachine(RuleBasedStateMachine):
    device = "cpu"

    @initialize(
        write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        pairing=st.sampled_from(["best_effort", "required"]),
        policy=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
        draft=st.booleans(),
        device_pages=st.integers(6, 12),
        host_pages=st.integers(2, 12),
        faults=st.sampled_from([0.0, 0.1, 0.3]),
        seed=st.integers(0, 1000),
    )
    def make(
        self,
        write_policy: str,
        pairing: str,
        policy: str,
        draft: bool,
        device_pages: int,
        host_pages: int,
        faults: float,
        seed: int,
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.backend = ToldBackend()
        self.backend.on = self.told
        self.rig = Rig(
            device_pages=device_pages,
            host_pages=host_pages,
            draft=draft,
            pairing=pairing,
            backend=self.backend,
            device=self.device,
            write_policy=write_policy,
            prefetch_policy=policy,
            storage={"prefetch_timeout_base_s": 0, "prefetch_timeout_per_page_s": 0},
        )
        self.cache = self.rig.cache
        self.leases: list[Lease] = []
        self.owned: list[int] = []
        self.waiting: dict[str, list[str]] = {}
        self.count = 0

    def told(self, hook: str, keys: list[str]) -> object:
        luck = self.random.random()
        # Jitter, so that calls and cancellations fall into reads and writes.
        time.sleep(luck * self.faults / 200)
        if luck < self.faults / 8:
            raise BackendUnavailable("told to", backend="told", operation=hook)
        if luck < self.faults / 4:
            raise OSError(5, "told to")
        self.backend.lose = {
            key
            for key in keys
            if self.random.random() < self.faults * (2 if key.startswith("d:") else 0.5)
        }
        self.backend.refuse = {key for key in keys if self.random.random() < self.faults}
        return None

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def take(self, lease: Lease) -> None:
        self.rig.check(lease)
        self.leases.append(lease)

    @rule(faults=st.sampled_from([0.0, 0.1, 0.5]))
    def set_faults(self, faults: float) -> None:
        self.faults = faults

    @rule(letters=PROMPTS, times=st.integers(1, 3), exact=st.booleans())
    def serve(self, letters: list[str], times: int, exact: bool) -> None:
        """A request from its prefetch to its end, as an engine runs it; an exact one computes
        everything behind the first lost draft again."""
        hashes = hashes_of(letters)
        for _ in range(times):
            name = self.name()
            self.cache.prefetch(name, hashes)
            self.rig.idle()
            self.rig.dirty()
            lease = self.cache.acquire(name, hashes)
            self.rig.check(lease)
            keep = len(lease)
            if exact and lease.drafts is not None and False in lease.drafts:
                keep = lease.drafts.index(False)
            pages = self.cache.allocate(len(hashes) - keep)
            if pages is not None:
                self.rig.fill(pages.tolist(), hashes[keep:])
                self.cache.insert(lease, hashes, torch.cat([lease.device_indices[:keep], pages]))
                self.rig.check(lease)
            self.cache.release(lease)

    @rule()
    def squeeze(self) -> None:
        """Has the device give up all that it can."""
        for count in range(self.rig.pools.device.num_pages, 0, -1):
            pages = self.cache.allocate(count)
            if pages is not None:
                self.cache.free(pages)
                return

    @rule(letters=PROMPTS)
    def acquire(self, letters: list[str]) -> None:
        self.take(self.cache.acquire(self.name(), hashes_of(letters)))

    @rule(letters=PROMPTS, wait=st.booleans())
    def prefetch(self, letters: list[str], wait: bool) -> None:
        name = self.name()
        self.cache.prefetch(name, hashes_of(letters))
        self.waiting[name] = hashes_of(letters)
        if wait:
            self.rig.idle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), ready=st.booleans(), cut=st.integers(0, 1))
    def acquire_prefetched(self, data: st.DataObject, ready: bool, cut: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        hashes = self.waiting.pop(name)
        if ready:
            self.rig.idle()
            assert self.cache.prefetch_ready(name)
        self.rig.dirty()
        self.take(self.cache.acquire(name, hashes[: len(hashes) - cut]))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[name]
        self.cache.cancel_prefetch(name)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), letters=PROMPTS, keep=st.integers(0, 6))
    def compute(self, data: st.DataObject, letters: list[str], keep: int) -> None:
        """Computes pages behind the first `keep` leased ones; pages of the lease itself too."""
        lease = data.draw(st.sampled_from(self.leases))
        hashes = list(lease.hashes)
        for letter in letters[: max(0, 7 - len(hashes))]:
            hashes = branch(hashes, 1, letter)
        keep = min(keep, len(lease)) if keep % 2 else len(lease)
        pages = self.cache.allocate(len(hashes) - keep)
        if pages is not None:
            self.rig.fill(pages.tolist(), hashes[keep:])
            self.cache.insert(lease, hashes, torch.cat([lease.device_indices[:keep], pages]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.cache.release(lease)
        self.cache.release(lease)

    @rule(count=st.integers(1, 6))
    def allocate(self, count: int) -> None:
        pages = self.cache.allocate(count)
        if pages is not None:
            self.owned += pages.tolist()

    @rule()
    def free(self) -> None:
        self.cache.free(torch.tensor(self.owned, dtype=torch.int64))
        self.owned = []

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @rule(timeout_s=st.sampled_from([0.0, 20.0]))
    def detach_and_attach(self, timeout_s: float) -> None:
        self.cache.detach_storage(timeout_s)
        self.rig.attach()

    @rule(letters=PROMPTS)
    def storage_loses(self, letters: list[str]) -> None:
        page_hash = hashes_of(letters)[-1]
        self.backend.forget(page_hash if len(letters) % 2 else f"d:{page_hash}")

    @rule()
    def idle(self) -> None:
        self.rig.idle()

    @invariant()
    def leased_pages_stay_what_they_are(self) -> None:
        for lease in self.leases if hasattr(self, "leases") else ():
            self.rig.check(lease)

    @invariant()
    def no_slot_is_lost_or_owned_twice(self) -> None:
        if not hasattr(self, "cache"):
            return
        tree, pools = self.cache._tree, self.rig.pools
        prefetches = self.cache._prefetches._holding
        device = [node.device for node in tree if node.device is not None] + self.owned
        host = [node.host for node in tree if node.host is not None]
        host += [slot for each in prefetches for slot in each.held.values()]
        for owned, allocator in (
            (device, pools.device_allocator),
            (host, pools.host_allocator),
        ):
            assert len(set(owned)) == len(owned)
            assert len(owned) + allocator.available == allocator.num_pages
            assert all(allocator._taken[owned])

    @invariant()
    def no_prefix_has_a_hole(self) -> None:
        for node in self.cache._tree if hasattr(self, "cache") else ():
            assert node.device is not None or node.host is not None
            parent = node.parent
            assert self.cache._tree.holds(parent)
            if node.device is not None and parent is not self.cache._tree.root:
                assert parent.device is not None

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.faults = 0.0
        for lease in self.leases:
            self.cache.release(lease)
        for name in self.waiting:
            self.cache.cancel_prefetch(name)
        if self.owned:
            self.cache.free(torch.tensor(self.owned))
        self.rig.close()
        assert not self.cache._storages.threads


CacheMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCache = CacheMachine.TestCase
