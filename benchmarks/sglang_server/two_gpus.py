"""Two GPUs: tensor-parallel servers, whose ranks store their pages apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .accept import COLD, HEALED, RESTARTED, AcceptLength
from .arguments import Start
from .one_gpu import Pair, repository_pair
from .run import Run
from .server import Server
from .stores import OURS, count_pages, delete_pages

RANKS = 2
LOST_FROM = 7
"""The first page of the prompt that one rank loses; SGLang reads nothing below 256 tokens."""
DRAFTS_OF_ONE, TARGETS_OF_ONE = "rank 1 lost drafts", "rank 1 lost targets"
ALL_DRAFTS_OF_ONE = "rank 1 lost all drafts, best_effort"
BACK = "back to the first configuration"
MLA, MLA_BEST_EFFORT = "MLA target, MHA draft", "MLA target, MHA draft, best_effort"
REFUSED = "only those of rank 0 are ever written"
"""What this package logs of drafts that SGLang doesn't write."""
OTHERS: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1},
    "bfloat16 KV": {"kv_dtype": "bfloat16"},
    "page_first": {"layout": "page_first"},
    "pages of 32": {"page_size": 32},
}
"""Other configurations, each on the same store as the first one."""


class TwoGPUs:
    """The parts of the run. `stores` are this package's."""

    def __init__(self, run: Run, stores: Sequence[str] = OURS) -> None:
        self.run = run
        models = run.folder / "models"
        self._pair = repository_pair(models, "STANDALONE")
        # The latent-attention target with the other pair's grouped one as its draft.
        latent = repository_pair(models, "STANDALONE", "mla")
        self._latent = replace(latent, draft=self._pair.target)
        self._accept = AcceptLength(
            run, "STANDALONE, the repository's", self._pair.prompt, self._pair.warm
        )
        self._places = {store: run.shelf.place(store, "ranks") for store in stores}
        self._mla = AcceptLength(run, MLA, self._latent.prompt, self._latent.warm)
        self._mla_place = run.shelf.place(next(iter(stores)), "mla")

    def measure(self) -> None:
        run = self.run
        first = run.ready(self._launch(COLD, mla=True))
        second, others = self._launch(RESTARTED, mla=True), run.launch(self._others())
        run.for_each(first, self._cold)
        run.stop(first.values())

        second, others = run.ready(second), run.ready(others)
        third = self._launch(BACK, mla=False)
        run.for_each(second, self._restarted)
        run.stop(second.values())
        run.for_each(others, self._other)
        run.stop(others.values())
        run.for_each(run.ready(third), self._back)

    def _launch(self, stage: str, *, mla: bool) -> dict[str, Server]:
        starts = [self._start(self._pair, store, f"{store} {stage}") for store in self._places]
        if mla:
            base = self._start(self._latent, next(iter(self._places)), f"mla {stage}")
            starts.append(replace(base, place=self._mla_place))
        return self.run.launch(starts)

    def _start(self, pair: Pair, store: str, name: str) -> Start:
        return Start(
            name=name,
            model=pair.target,
            draft=pair.draft,
            place=self._places[store],
            port=self.run.port(),
            ranks=RANKS,
        )

    def _others(self) -> list[Start]:
        """Each other configuration, on one store after the other."""
        stores = list(self._places)
        return [
            replace(self._start(self._pair, stores[n % len(stores)], name), **change)
            for n, (name, change) in enumerate(OTHERS.items())
        ]

    def _cold(self, name: str, server: Server) -> None:
        accept, store = self._of(server)
        accept.warm_up(server)
        accept.measure(COLD, server, store)
        server.flush()
        self._count(COLD, server, accept)

    def _restarted(self, name: str, server: Server) -> None:
        accept, store = self._of(server)
        accept.warm_up(server)
        accept.measure(RESTARTED, server, store)
        server.flush()
        if accept is not self._mla:
            return
        self._count(RESTARTED, server, accept)
        self.run.add("log", store=store, stage=MLA, refused=server.logged(REFUSED))
        server.detach()
        server.attach(pairing="best_effort")
        accept.measure(MLA_BEST_EFFORT, server, store)

    def _other(self, name: str, server: Server) -> None:
        """Nothing of the first configuration is read, and what is stored then is."""
        self._accept.warm_up(server)
        store = server.start.place.store
        self._accept.measure(name, server, store)
        server.flush()
        self._accept.measure(f"{name}, again", server, store)
        server.flush()

    def _back(self, name: str, server: Server) -> None:
        place = server.start.place
        accept = self._accept
        accept.warm_up(server)
        accept.measure(BACK, server, place.store)
        server.flush()
        lost = set(accept.hashes(server.start.page_size, "tokens")[LOST_FROM:])
        for stage, drafts in ((DRAFTS_OF_ONE, True), (TARGETS_OF_ONE, False)):
            deleted = delete_pages(place, drafts=drafts, rank=1, hashes=lost)
            self.run.add("deleted", store=place.store, stage=stage, pages=deleted)
            accept.measure(stage, server, place.store)
            server.flush()
            accept.measure(f"{stage}, {HEALED}", server, place.store)
            server.flush()
        server.detach()
        deleted = delete_pages(place, drafts=True, rank=1)
        self.run.add("deleted", store=place.store, stage=ALL_DRAFTS_OF_ONE, pages=deleted)
        server.attach(pairing="best_effort")
        accept.measure(ALL_DRAFTS_OF_ONE, server, place.store)

    def _of(self, server: Server) -> tuple[AcceptLength, str]:
        mla = server.start.place is self._mla_place
        return (self._mla if mla else self._accept), server.start.place.store

    def _count(self, stage: str, server: Server, accept: AcceptLength) -> None:
        hashes = set(accept.hashes(server.start.page_size, "tokens"))
        pages = count_pages(server.start.place, hashes)
        self.run.add("pages", pair=accept.pair, store=server.start.place.store, stage=stage,
                     stored=pages)  # fmt: skip
