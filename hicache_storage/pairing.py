"""PairedStore: target and draft pages under one page hash, written and read together.

The target's page lies under `<hash>` in the target's namespace, the draft's under `d:<hash>` in
the draft's. The draft is written first and the target last, so a visible target implies that
its draft was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import BackendError, ConfigError, PageSizeMismatch
from .keys import draft_key
from .namespace import Namespace
from .page import as_spans, zero_spans
from .store import Store

Pairing = Literal["best_effort", "required"]


@dataclass(frozen=True)
class PairResult:
    """What became of a batch of pairs, target and draft apart."""

    target: list[bool]
    draft: list[bool] | None
    """None if there is no draft pool ("off"), which is not a miss."""
    pairing: Pairing
    draft_error: BackendError | None = None
    """Why the whole draft half failed, where pairing is best effort; never raised."""

    @property
    def usable_pages(self) -> int:
        """The leading run that an engine may use: of target hits, or of pairs if required."""
        run = leading_run(self.target)
        if self.draft is not None and self.pairing == "required":
            run = min(run, leading_run(self.draft))
        return run

    @property
    def usable_drafts(self) -> int:
        """Draft hits within the usable run."""
        return sum(self.draft[: self.usable_pages]) if self.draft is not None else 0


@dataclass(frozen=True)
class PairCount:
    """What `exists` found: leading runs, in pages."""

    target: int
    draft: int | None
    """None if it was not asked for: no draft pool, or best effort."""
    usable: int


class PairedStore:
    """Pairs of pages in one Store.

    `pairing` "best_effort": a lost draft never costs the target hit; the draft's buffers are
    zeroed and the loss is reported. "required": a page without its draft is not usable, and a
    target is written only where its draft was stored. Without `draft` it serves the target
    alone and makes no draft request.

    `writes_target` and `writes_draft` say which halves are this rank's to write (see
    `pools.ranks`): where ranks share the pages of one half, one of them writes it. A half that
    is another rank's counts as stored; reads are not affected.
    """

    def __init__(
        self,
        store: Store,
        target: Namespace,
        draft: Namespace | None = None,
        *,
        pairing: Pairing = "best_effort",
        writes_target: bool = True,
        writes_draft: bool = True,
    ) -> None:
        if pairing not in ("best_effort", "required"):
            raise ConfigError(f"pairing must be 'best_effort' or 'required', got {pairing!r}")
        if draft is not None and draft.page_size != target.page_size:
            raise ConfigError(
                f"draft pages have {draft.page_size} tokens and target pages "
                f"{target.page_size}; a pair covers the same tokens"
            )
        self.store = store
        self.target = target
        self.draft = draft
        self.pairing: Pairing = pairing
        self.writes_target = writes_target
        self.writes_draft = writes_draft

    def batch_set(
        self,
        hashes: Sequence[str],
        target_pages: Sequence[Any],
        draft_pages: Sequence[Any] | None = None,
        prefix_hashes: Sequence[str] | None = None,
    ) -> PairResult:
        """Stores pairs, drafts first. Raises what the store raises for the target."""
        self._check(hashes, target_pages, draft_pages)
        if self.draft is None or draft_pages is None:
            stored = self._set_target(hashes, target_pages, prefix_hashes)
            return PairResult(stored, None, self.pairing)
        drafts, error = [True] * len(hashes), None
        if self.writes_draft:
            drafts, error = self._draft_half(
                lambda: self.store.batch_set(
                    self._draft(), _drafts(hashes), draft_pages, _drafts(prefix_hashes)
                ),
                len(hashes),
            )
        if self.pairing == "best_effort" or all(drafts):
            stored = self._set_target(hashes, target_pages, prefix_hashes)
            return PairResult(stored, drafts, self.pairing, error)
        paired = [i for i, done in enumerate(drafts) if done]
        done = self._set_target(
            [hashes[i] for i in paired], [target_pages[i] for i in paired], prefix_hashes
        )
        stored = [False] * len(hashes)
        for i, answer in zip(paired, done, strict=True):
            stored[i] = answer
        return PairResult(stored, drafts, self.pairing, error)

    def batch_get(
        self,
        hashes: Sequence[str],
        target_buffers: Sequence[Any],
        draft_buffers: Sequence[Any] | None = None,
        prefix_hashes: Sequence[str] | None = None,
    ) -> PairResult:
        """Reads pairs, both halves before it returns.

        Drafts are read for the leading run of target hits only. With best effort every draft
        buffer in that run that wasn't filled is zeroed.
        """
        self._check(hashes, target_buffers, draft_buffers)
        hits = self.store.batch_get(self.target, hashes, target_buffers, prefix_hashes)
        if self.draft is None or draft_buffers is None:
            return PairResult(hits, None, self.pairing)
        run = leading_run(hits)
        drafts, error = self._draft_half(
            lambda: self.store.batch_get(
                self._draft(), _drafts(hashes[:run]), draft_buffers[:run], _drafts(prefix_hashes)
            ),
            run,
        )
        if self.pairing == "best_effort":
            for hit, buffer in zip(drafts, draft_buffers, strict=False):
                if not hit:
                    zero_spans(as_spans(buffer, writable=True))
        drafts += [False] * (len(hashes) - run)
        return PairResult(hits, drafts, self.pairing, error)

    def exists(
        self, hashes: Sequence[str], prefix_hashes: Sequence[str] | None = None
    ) -> PairCount:
        """Leading runs of stored pages; the draft is asked for only if it is required, and then in
        one call: a remote store takes as long for a call as for its slowest page."""
        if self.draft is None or self.pairing == "best_effort":
            target = self.store.exists(self.target, hashes, prefix_hashes)
            return PairCount(target, None, target)
        prefix = None if prefix_hashes is None else self._halves(prefix_hashes)
        usable, odd = divmod(self.store.exists_across(self._halves(hashes), prefix), 2)
        if not odd:
            return PairCount(usable, usable, usable)
        # The draft is missing: how far the targets go on is for whoever looks into that.
        after = [*(prefix_hashes or ()), *hashes[: usable + 1]]
        more = self.store.exists(self.target, hashes[usable + 1 :], after)
        return PairCount(usable + 1 + more, usable, usable)

    def delete(self, hashes: Sequence[str]) -> list[bool]:
        """Deletes both halves, the target first; True where neither is stored any more."""
        gone = self.store.delete(self.target, hashes)
        if self.draft is not None:
            drafts = self.store.delete(self.draft, _drafts(hashes))
            gone = [a and b for a, b in zip(gone, drafts, strict=True)]
        return gone

    def _set_target(
        self, hashes: Sequence[str], pages: Sequence[Any], prefix_hashes: Sequence[str] | None
    ) -> list[bool]:
        if not self.writes_target:
            return [True] * len(hashes)
        return self.store.batch_set(self.target, hashes, pages, prefix_hashes)

    def _halves(self, hashes: Sequence[str]) -> list[tuple[Namespace, str]]:
        """The target's and the draft's key of each page, one behind the other."""
        spaces = self.target, self._draft()
        return [
            (space, key)
            for page_hash in hashes
            for space, key in zip(spaces, (page_hash, draft_key(page_hash)), strict=True)
        ]

    def _draft(self) -> Namespace:
        assert self.draft is not None
        return self.draft

    def _draft_half(
        self, call: Callable[[], list[bool]], length: int
    ) -> tuple[list[bool], BackendError | None]:
        try:
            return call(), None
        except BackendError as error:
            if self.pairing == "required":
                raise
            return [False] * length, error

    def _check(
        self, hashes: Sequence[str], target: Sequence[Any], draft: Sequence[Any] | None
    ) -> None:
        if self.draft is None and draft is not None:
            raise ConfigError("draft pages given, but this PairedStore has no draft namespace")
        for half, pages in (("target", target), ("draft", draft)):
            if pages is not None and len(pages) != len(hashes):
                raise PageSizeMismatch(f"{len(hashes)} hashes but {len(pages)} {half} pages")


def leading_run(hits: Sequence[bool]) -> int:
    """How many entries stand before the first False."""
    for i, hit in enumerate(hits):
        if not hit:
            return i
    return len(hits)


def _drafts(hashes: Sequence[str] | None) -> Any:
    return None if hashes is None else [draft_key(page_hash) for page_hash in hashes]
