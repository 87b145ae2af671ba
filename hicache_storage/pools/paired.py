"""PairedPools: the host-pool adapter. Target and draft pages move together, slot by slot."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from ..errors import ConfigError
from ..namespace import Namespace
from ..page import AnyPage
from . import memory
from .allocator import PageAllocator
from .device import DevicePool, paged_part
from .host import HostPool
from .in_flight import InFlight
from .indices import page_list
from .lanes import Lane
from .layouts import Layout
from .ranks import Ranks
from .strategy import Strategy, check_strategy
from .transfer import Ends, LayerEvents, Transfer, prepare

_log = logging.getLogger(__name__)
_SUPPORTED = "MHADevicePool, MLADevicePool and HybridDevicePool"


class PairedPools:
    """A target's device pool with its host pool, and the draft's beside them once registered.

    Target and draft share page slots: `device_allocator` and `host_allocator` serve both, and
    every copy carries both under the same indices. On CUDA the copies run on this object's own
    streams, each way its own, behind what the calling thread's current stream has been given and
    behind earlier copies the other way that share a slot with them. One thread makes the copies;
    spans may be used by any thread. `strategy` says which way pages take there.

    Raises ConfigError for a pool of a type that isn't supported or without storage, and if host
    memory doesn't suffice.
    """

    def __init__(
        self,
        device_pool: object,
        *,
        host_pages: int,
        layout: Layout = "page_first",
        pin: bool | None = None,
        strategy: Strategy = "auto",
    ) -> None:
        check_strategy(strategy)
        self.strategy: Strategy = strategy
        self.device = _paged("target", device_pool)
        self._pin = pin
        self._available = memory.available_bytes()
        memory.require_host_memory(
            host_pages * self.device.geometry.page_bytes,
            self._available,
            f"a host pool of {host_pages} pages",
        )
        self.host = HostPool(self.device.geometry, host_pages, layout, pin)
        self.draft_device: DevicePool | None = None
        self.draft_host: HostPool | None = None
        self.device_allocator = PageAllocator(self.device.num_pages)
        self.host_allocator = PageAllocator(host_pages)
        self._warned = False
        cuda = self.device.device.type == "cuda"
        self._out_lane = Lane(self.device.device) if cuda else None
        self._back_lane = Lane(self.device.device) if cuda else None
        self._backups, self._loads = InFlight(), InFlight()
        self._ends = Ends(self.device, self.host)
        self._prepare(self.device, self.host)

    @property
    def page_size(self) -> int:
        """Tokens in a page, of target and draft."""
        return self.device.geometry.page_size

    def register_draft(self, draft_pool: object) -> bool:
        """Gives the draft's device pool a host pool of its own kind, with as many slots as the
        target's. True if pages are paired from now on.

        False, and everything goes on without a draft: for None (no draft model, n-gram
        speculation), with one warning for a pool of a type that isn't supported. Of a list of
        EAGLE layer pools the first one is used, of a hybrid pool the full-attention part.
        Raises ConfigError if page size or page count differ from the target's, if the pool has
        no storage, if host memory doesn't suffice, if a draft is registered already or host
        pages are in use.
        """
        if isinstance(draft_pool, (list, tuple)):
            draft_pool = draft_pool[0] if draft_pool else None
        if draft_pool is None:
            _log.info("no draft pool: pages are moved and stored without drafts")
            return False
        pool = paged_part(draft_pool)
        if pool is None:
            if not self._warned:
                _log.warning(
                    "draft pools of type %s are not supported (%s are): pages are moved and "
                    "stored without drafts",
                    type(draft_pool).__name__,
                    _SUPPORTED,
                )
                self._warned = True
            return False
        pool.check_storage("draft pool")
        self._check_draft(pool)
        host = HostPool(pool.geometry, self.host.num_pages, self.host.layout, self._pin)
        ends = Ends(self.device, self.host, (pool, host))
        self._prepare(pool, host)
        self.draft_device, self.draft_host, self._ends = pool, host, ends
        return True

    def backup(self, device_indices: Tensor, host_indices: Tensor) -> Transfer:
        """Copies pages to host slots, all layers of target and draft; see `Ends.backup`.

        The slots at both ends are in use until the Transfer is done.
        """
        after = self._loads.sharing(device_indices, host_indices)
        moving = self._ends.backup(
            device_indices,
            host_indices,
            lane=self._out_lane,
            strategy=self.strategy,
            after=after,
        )
        self._backups.add(moving, device_indices, host_indices)
        return moving

    def load_back(self, host_indices: Tensor, device_indices: Tensor) -> LayerEvents:
        """Copies pages to device slots layer by layer, target and draft; see
        `Ends.load_back`."""
        after = self._backups.sharing(device_indices, host_indices)
        loading = self._ends.load_back(
            host_indices,
            device_indices,
            lane=self._back_lane,
            strategy=self.strategy,
            after=after,
        )
        self._loads.add(loading, device_indices, host_indices)
        return loading

    def target_spans(self, host_indices: Tensor) -> list[AnyPage]:
        """The target's pages in these host slots, in place."""
        return _spans(self.host, host_indices)

    def draft_spans(self, host_indices: Tensor) -> list[AnyPage] | None:
        """The draft's pages in these host slots, in place; None without a draft."""
        return None if self.draft_host is None else _spans(self.draft_host, host_indices)

    def zero_draft(self, host_indices: Tensor) -> None:
        """Fills the draft's pages in these host slots with zeros; without a draft, nothing."""
        if self.draft_host is not None:
            self.draft_host.zero(host_indices)

    def namespaces(
        self,
        *,
        model: str,
        revision: str = "",
        draft_model: str = "",
        draft_revision: str = "",
        tenant: str = "",
        ranks: Ranks | None = None,
    ) -> tuple[Namespace, Namespace | None]:
        """The namespaces of the target's and the draft's pages; None without a draft.

        `draft_model` must be given if there is one. `ranks` are this process's.
        """
        target = self.device.geometry.namespace(
            model=model,
            order=self.host.order,
            revision=revision,
            tenant=tenant,
            **(ranks or Ranks()).fields(),
        )
        if self.draft_device is None or self.draft_host is None:
            return target, None
        draft = self.draft_device.geometry.draft_namespace(
            target,
            model=draft_model,
            order=self.draft_host.order,
            revision=draft_revision,
            ranks=ranks,
        )
        return target, draft

    def writes_target(self, ranks: Ranks) -> bool:
        """Whether this rank writes the target's pages to storage (see `Ranks.writes`)."""
        return ranks.writes(self.device.geometry.kind)

    def writes_draft(self, ranks: Ranks) -> bool:
        """Whether this rank writes the draft's pages to storage; False without a draft."""
        return self.draft_device is not None and ranks.writes(self.draft_device.geometry.kind)

    def _prepare(self, device: DevicePool, host: HostPool) -> None:
        if self._out_lane is not None and self._back_lane is not None:
            prepare((device, host), self._out_lane, self._back_lane, self.strategy)

    def _check_draft(self, pool: DevicePool) -> None:
        if self.draft_device is not None:
            raise ConfigError("a draft pool is registered already; there is one for each target")
        if self.host_allocator.available != self.host.num_pages:
            raise ConfigError(
                "register the draft pool before host pages are used: the pages in use have no draft"
            )
        for what, ours, found in (
            ("page_size", self.page_size, pool.geometry.page_size),
            ("num_pages", self.device.num_pages, pool.num_pages),
            ("device", self.device.device, pool.device),
        ):
            if ours != found:
                raise ConfigError(
                    f"draft pool ({type(pool).__name__}) has {what} {found}, target pool "
                    f"({type(self.device).__name__}) has {what} {ours}; they share page slots, "
                    "so both must be equal"
                )
        draft_bytes = self.host.num_pages * pool.geometry.page_bytes
        both = f"{self.host.num_pages} host pages of target and draft"
        memory.require_host_memory(self.host.size_bytes + draft_bytes, self._available, both)
        memory.require_host_memory(draft_bytes, memory.available_bytes(), "the draft's part")


def _paged(name: str, pool: object) -> DevicePool:
    paged = paged_part(pool)
    if paged is None:
        raise ConfigError(
            f"{name} pool of type {type(pool).__name__} is not supported; {_SUPPORTED} are"
        )
    paged.check_storage(f"{name} pool")
    return paged


def _spans(host: HostPool, host_indices: Tensor) -> list[AnyPage]:
    slots: Sequence[int] = page_list("host_indices", host_indices, host.num_pages).tolist()
    return [host.spans(slot) for slot in slots]
