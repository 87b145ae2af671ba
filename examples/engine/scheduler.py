"""Takes requests through the cache and the models, one piece of work at a time.

A request's way: prefetch from storage into the host pool -> acquire a lease on the pages that are
cached and load them back to the device -> run the rest of the prompt, page by page, waiting for the
load-back layer by layer -> speculate -> hand the whole pages to the cache, which backs them up ->
release. Requests run one after the other or side by side: each step gives every running
request one piece of work.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial

import torch
from engine import Engine
from paged import PagedRows, PageTable
from request import Request
from speculation import Rows, accepted, catch_up, guess, run_target
from torch import Tensor

POLL_S = 0.0005  # how long to sleep while all that there is to do is wait for storage


class Scheduler:
    """Serves requests on an `Engine`. One thread calls it."""

    def __init__(self, engine: Engine, *, most_running: int = 4) -> None:
        self.engine = engine
        self.most_running = most_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def submit(self, request: Request) -> Request:
        """Queue a request and start its prefetch."""
        request.measures.submitted_s = time.perf_counter()
        self.waiting.append(request)
        self.engine.cache.prefetch(request.id, request.hashes)
        return request

    def run(self) -> None:
        """Step until every request is finished."""
        while self.waiting or self.running:
            if not self.step():
                time.sleep(POLL_S)

    def step(self) -> bool:
        """Admit what fits, then do one piece of every running request; False if all must wait."""
        while self.waiting and len(self.running) < self.most_running and self._admit():
            pass
        for request in list(self.running):
            try:
                self._advance(request)
            except BaseException:
                self.cancel(request)
                raise
            if request.finished:
                self._finish(request)
        return bool(self.running)

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is; its pages become free."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.engine.cache.cancel_prefetch(request.id)
        if request in self.running:
            self.running.remove(request)
        self._give_back(request)

    def _admit(self) -> bool:
        """Move the first waiting request to the running ones if its pages are there.

        Only the first one waits for pages, and holds its cached ones meanwhile: those that run
        will finish and free theirs, so nothing waits for ever.
        """
        request, cache = self.waiting[0], self.engine.cache
        if request.lease is None:
            if not cache.prefetch_ready(request.id):
                return False
            request.lease = cache.acquire(request.id, request.hashes)
        cached = request.lease.device_indices
        own = cache.allocate(request.pages_needed - len(cached))
        if own is None:
            if not self.running:
                self.cancel(request)
                raise RuntimeError(
                    f"request {request.id!r} needs {request.pages_needed} device pages, and not so "
                    "many can be had although nothing runs: someone else holds pages"
                )
            return False
        request.own = own
        request.table = PageTable(
            torch.cat((cached, own)), self.engine.page_size, self.engine.device
        )
        self._note_hits(request)
        self.waiting.popleft()
        self.running.append(request)
        return True

    def _note_hits(self, request: Request) -> None:
        lease, measures, page_size = request.lease, request.measures, self.engine.page_size
        request.done = len(lease.device_indices) * page_size
        measures.device_tokens = lease.from_device * page_size
        measures.host_tokens = lease.from_host * page_size
        measures.storage_tokens = lease.from_storage * page_size
        if lease.drafts is not None:
            measures.draft_hits = sum(lease.drafts)
            measures.lost_drafts = len(lease.drafts) - sum(lease.drafts)

    def _advance(self, request: Request) -> None:
        if request.done < len(request.prompt):
            self._prefill(request)
        else:
            self._speculate(request)

    def _prefill(self, request: Request) -> None:
        """Run the prompt's tokens up to the next page boundary, in the target and the draft.

        In pieces that don't depend on where the cache's pages end: so a restored request computes
        the rest in the very shapes of a cold one, and gets its very bits.
        """
        start, page_size = request.done, self.engine.page_size
        stop = min((start // page_size + 1) * page_size, len(request.prompt))
        tokens = request.tokens
        states, said = run_target(
            self.engine.target, self._rows(request, draft=False), tokens[start:stop], start
        )
        following = tokens[start + 1 : stop + 1]
        if stop == len(request.prompt):
            request.take(said[-1:].tolist())
            following = torch.cat((following, said[-1:]))
        self._catch_up(request, states.features, following)
        if request.done == len(request.prompt):
            self._hand_over(request)

    def _speculate(self, request: Request) -> None:
        """One step: guess, verify, take what is right."""
        assert request.output_state is not None
        start = request.done  # the position of the last known token
        guesses = guess(
            self.engine.head, self._rows(request, draft=True), request.output_state, start
        )
        known = torch.tensor(request.known[-1:], device=guesses.device)
        states, said = run_target(
            self.engine.target,
            self._rows(request, draft=False),
            torch.cat((known, guesses)),
            start,
        )
        right = accepted(guesses, said)
        request.measures.steps += 1
        request.measures.verified_tokens += len(right)
        self._catch_up(request, states.features[: len(right)], right)
        request.take(right.tolist())

    def _catch_up(self, request: Request, features: Tensor, following: Tensor) -> None:
        rows = self._rows(request, draft=True)
        request.output_state = catch_up(self.engine.head, rows, features, following, request.done)
        request.done += len(following)

    def _rows(self, request: Request, *, draft: bool) -> Rows:
        pool = self.engine.draft_pool if draft else self.engine.target_pool
        assert request.table is not None
        return partial(PagedRows, pool, request.table, loading=request.lease.loading)

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self._hand_over(request)
        self._give_back(request)

    def _hand_over(self, request: Request) -> None:
        """Give the cache all whole pages of the known tokens."""
        assert request.table is not None
        hashes = self.engine.hashes(request.known)
        self.engine.cache.insert(request.lease, hashes, request.table.pages[: len(hashes)])
        request.own = request.table.pages[len(hashes) :]
        request.table.replace(torch.cat((request.lease.device_indices, request.own)))

    def _give_back(self, request: Request) -> None:
        cache = self.engine.cache
        if request.own is not None:
            cache.free(request.own)
        if request.lease is not None:
            cache.release(request.lease)
        request.own = request.lease = request.table = None
