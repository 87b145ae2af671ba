"""PoolStorage: the pages of one of SGLang's pools in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..edge import StorageEdge
from ..errors import PageSizeMismatch
from ..keys import tagged_key
from ..namespace import Namespace
from ..page import AnyPage, zero_spans
from ..pairing import PairedStore
from ..store import Store
from .sglang_keys import key_tag
from .sglang_pages import HostPages, tensor_spans
from .sglang_stats import TransferStats, Way

_ZEROS = bytes(4096)


class PoolStorage:
    """One pool's pages under one namespace, by page hash. No call raises an error of storage.

    `pages` are the host pool's; None for draft pages that come as flat tensors only. `stats`
    gets what is moved.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        namespace: Namespace,
        pages: HostPages | None,
        *,
        writes: bool,
        stats: TransferStats | None = None,
    ) -> None:
        self.name = name
        self.tag = key_tag(name)
        self.namespace = namespace
        self.pages = pages
        self._stats = stats
        # A pool alone is a pair without a draft: its keys carry their tags already.
        self.edge = StorageEdge(PairedStore(store, namespace, writes_target=writes))

    def run(self, hashes: Sequence[str], prefix: Sequence[str] | None) -> int:
        """The length of the leading run of stored pages."""
        return self.edge.exists(self._keys(hashes), self._prefix(prefix)).usable

    def write(
        self, hashes: Sequence[str], pages: Sequence[AnyPage], prefix: Sequence[str] | None = None
    ) -> list[bool]:
        """Stores pages; True for each that is stored, or another rank's to store."""
        return self._measured(
            "backup",
            lambda: (
                self.edge.batch_set(self._keys(hashes), pages, None, self._prefix(prefix)).target
            ),
        )

    def read(
        self,
        hashes: Sequence[str],
        buffers: Sequence[AnyPage],
        prefix: Sequence[str] | None = None,
    ) -> list[bool]:
        """Reads pages into their buffers; True for each that arrived. Those of a miss hold
        anything."""
        return self._measured(
            "prefetch",
            lambda: (
                self.edge.batch_get(self._keys(hashes), buffers, None, self._prefix(prefix)).target
            ),
        )

    def write_slots(
        self, hashes: Sequence[str], host_indices: Tensor | None, prefix: Sequence[str] | None
    ) -> list[bool]:
        """Stores pages from the host pool. Raises PageSizeMismatch for indices that don't fit."""
        pages = self.host_pages()
        return self.write(hashes, pages.to_write(pages.pages(len(hashes), host_indices)), prefix)

    def read_slots(
        self, hashes: Sequence[str], host_indices: Tensor | None, prefix: Sequence[str] | None
    ) -> list[bool]:
        """Reads pages into the host pool. Raises PageSizeMismatch for indices that don't fit,
        before any byte moves."""
        pages = self.host_pages()
        buffers, finish = pages.to_read(pages.pages(len(hashes), host_indices))
        hits = self.read(hashes, buffers, prefix)
        finish(hits)
        return hits

    def zero_slots(self, host_indices: Tensor, which: Sequence[bool]) -> None:
        """Fills those pages of the host pool with zeros whose entry is True."""
        pages = self.host_pages()
        for page, chosen in zip(pages.pages(len(which), host_indices), which, strict=True):
            if chosen:
                pages.zero(page)

    def host_pages(self) -> HostPages:
        """Raises PageSizeMismatch if only flat tensors of this pool are known."""
        if self.pages is None:
            raise PageSizeMismatch(f"pool {self.name!r} has no host pool registered")
        return self.pages

    def _measured(self, way: Way, call: Callable[[], list[bool]]) -> list[bool]:
        if self._stats is None:
            return call()
        return self._stats.measured(way, self.namespace.page_bytes, call)

    def _keys(self, hashes: Sequence[str]) -> list[str]:
        return [tagged_key(self.tag, h) for h in hashes] if self.tag else list(hashes)

    def _prefix(self, prefix: Sequence[str] | None) -> list[str] | None:
        return None if prefix is None else self._keys(prefix)


def flat_spans(tensors: Sequence[Any]) -> list[AnyPage]:
    """Flat tensors as spans to read from or, if they are contiguous, to read into."""
    return [tensor_spans(tensor) for tensor in tensors]


def is_zero(page: AnyPage) -> bool:
    """Whether a page has nothing but zero bytes."""
    for span in page:
        for start in range(0, len(span), len(_ZEROS)):
            part = span[start : start + len(_ZEROS)]
            if part != _ZEROS[: len(part)]:
                return False
    return True


def zero_missed(buffers: Sequence[AnyPage], hits: Sequence[bool]) -> None:
    """Fills the buffers of misses with zeros, whatever a failed read left in them."""
    for buffer, hit in zip(buffers, hits, strict=True):
        if not hit:
            zero_spans(buffer)
