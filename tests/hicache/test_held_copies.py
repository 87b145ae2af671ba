"""A HiCache whose copies come late, and whose load-backs are asked for as they are waited for."""

from __future__ import annotations

import pytest
from hicache.held_copies import Device, held_copies
from hicache.rig import Rig, chain
from hicache.test_hicache_stateful import CacheMachine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from hicache_storage.hicache import Lease


class LateMachine(CacheMachine):
    """Leases are looked at as a forward pass does it, layer by layer, or not at all."""

    kernels = False
    seed = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).seed += 1
        self._held = held_copies(self.seed, kernels=self.kernels)
        self.gpu: Device = self._held.__enter__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self._held.__exit__(None, None, None)

    def take(self, lease: Lease) -> None:
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        for layer in range(lease.loading.layers):
            lease.loading.wait(layer)
        self.rig.check(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), layer=st.integers(0, 1))
    def forward_begins(self, data: st.DataObject, layer: int) -> None:
        data.draw(st.sampled_from(self.leases)).loading.wait(layer)

    @rule(steps=st.integers(1, 30))
    def device_goes_on(self, steps: int) -> None:
        for _ in range(steps):
            self.gpu.step()

    @invariant()
    def leased_pages_stay_what_they_are(self) -> None:
        for lease in self.leases if hasattr(self, "leases") else ():
            if lease.loading.asked and all(event.arrived for event in lease.loading.events):
                self.rig.check(lease)


class LateKernelMachine(LateMachine):
    kernels = True


@pytest.mark.parametrize("machine", [LateMachine, LateKernelMachine])
def test_random_use_with_copies_that_come_late(machine: type[LateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("kernels", [False, True])
def test_a_computed_page_gives_way_to_one_that_is_on_its_way_once_that_is_there(
    kernels: bool,
) -> None:
    """It is on its way for another request."""
    hashes = chain(2)
    with held_copies(1, kernels=kernels):
        one = Rig(store=False, draft=False, device_pages=6)
        one.keep(hashes)
        every = one.cache.allocate(6)
        assert every is not None
        one.cache.free(every)
        one.dirty()
        computing = one.cache.acquire("computes", [])
        waiting = one.cache.acquire("waits", hashes)
        assert waiting.from_host == 2
        pages = one.cache.allocate(2)
        assert pages is not None
        one.fill(pages.tolist(), hashes)
        one.cache.insert(computing, hashes, pages)
        assert computing.device_indices.tolist() == waiting.device_indices.tolist()
        for page, page_hash in zip(computing.device_indices.tolist(), hashes, strict=True):
            assert one.holds(page, page_hash, "target")
        one.cache.release(computing)
        one.cache.release(waiting)
        assert not one.cache._leasing._loads
        one.close()
