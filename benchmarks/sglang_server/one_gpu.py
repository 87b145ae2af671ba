"""One GPU: all stores at once, each with a server of its own, before and after a restart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .accept import BEST_EFFORT, COLD, HEALED, REQUIRED, RESTARTED, AcceptLength
from .arguments import Algorithm, Start
from .checkpoints import write_head, write_target
from .first_token import compare, store_prompts
from .prompts import EXAMPLE, copied, copied_text, random_tokens
from .run import Run
from .server import Server
from .stores import STORES, Place, delete_pages
from .wide import DRAFT_LAYERS, TARGET_LAYERS, VOCABULARY, write_wide

SMALL, WIDE = "small pages", "pages of an 8B model"
EAGLE3_RELEASE = "0.5.16"
_LAST_S = 15.0
"""Kept for stopping and the report."""


@dataclass(frozen=True)
class Pair:
    """A target and its draft, as folders, and prompts for them."""

    name: str
    algorithm: Algorithm
    target: Path
    draft: Path
    prompt: list[int]
    warm: list[int]


def repository_pair(folder: Path, algorithm: Algorithm, kind: str = "mha") -> Pair:
    """The example's pair as models of SGLang's; STANDALONE lets the target guess for itself."""
    target, head = folder / kind, folder / f"{kind}-head"
    if not target.exists():
        write_target(EXAMPLE / "checkpoints" / kind, target)
        write_head(EXAMPLE / "checkpoints" / kind, head)
    draft = head if algorithm == "EAGLE3" else target
    texts = copied_text("caches", 1024), copied_text("harbour", 1024)
    return Pair("the repository's", algorithm, target, draft, *texts)


def trained_pair(checkpoint: Path, folder: Path) -> Pair:
    """A pair of `train_eagle3`, whose documents are random tokens."""
    target, head = folder / "trained", folder / "trained-head"
    write_target(checkpoint, target)
    write_head(checkpoint, head)
    texts = (copied(random_tokens(1024, 1024, seed), 1024) for seed in (1, 2))
    return Pair("trained", "EAGLE3", target, head, *texts)


class OneGPU:
    """The parts of the run, in the order in which they fit into the least time.

    Servers for the next part start while the ones before are measured: what is measured then is
    not time. A first server ends before the second one of its store is asked anything.
    """

    def __init__(
        self, run: Run, stores: Sequence[str] = STORES, pairs: Iterable[Path] = (), rounds: int = 9
    ) -> None:
        self.run = run
        self.rounds = rounds
        models = run.folder / "models"
        small = repository_pair(models, "STANDALONE")
        eagles = [repository_pair(models, "EAGLE3")] if run.release == EAGLE3_RELEASE else []
        eagles += [trained_pair(path, models) for path in pairs]
        self._small = AcceptLength(run, f"STANDALONE, {small.name}", small.prompt, small.warm)
        self._eagles = {
            f"eagle3 {n}": AcceptLength(run, f"EAGLE3, {pair.name}", pair.prompt, pair.warm)
            for n, pair in enumerate(eagles)
        }
        self._pairs = dict.fromkeys(stores, small)
        self._pairs |= dict(zip(self._eagles, eagles, strict=True))
        self._places = {store: run.shelf.place(store, "accept") for store in stores}
        ours = next(store for store in reversed(stores) if store in ("s3", "lmdb", "file"))
        self._places |= {
            name: run.shelf.place(ours, name.replace(" ", "-")) for name in self._eagles
        }
        self._wide_places = {store: run.shelf.place(store, "wide") for store in stores}
        self._models = models
        self._stores = list(stores)

    def measure(self) -> None:
        run = self.run
        first = self._ready(self._launch(COLD))
        second, wide = self._launch(RESTARTED), self._launch_wide()
        run.for_each(first, self._cold)
        run.stop(first.values())

        second = self._ready(second)
        run.for_each(second, self._restarted)
        small = {name: server for name, server in second.items() if name in self._stores}
        eagles = {name: server for name, server in second.items() if name not in self._stores}
        run.stop(eagles.values())
        wide = self._ready(wide)
        prompts = [
            random_tokens(VOCABULARY, tokens, seed) for seed, tokens in ((3, 1024), (4, 8192))
        ]
        store_prompts(run, wide, [random_tokens(VOCABULARY, 1024, 5), *prompts])
        # Twice as many rounds: these times are short, and vary more.
        compare(run, SMALL, small, self._small.prompt, page_size=64, rounds=2 * self.rounds,
                least_left_s=120)  # fmt: skip
        ours = {name: server for name, server in small.items() if self._places[name].ours}
        run.for_each(ours, self._without_drafts)
        run.stop(small.values())
        for prompt in prompts:
            compare(run, WIDE, wide, prompt, page_size=64, rounds=self.rounds, least_left_s=_LAST_S)

    def _launch(self, stage: str) -> dict[str, Server]:
        starts = {
            name: Start(
                name=f"{name} {stage}",
                model=pair.target,
                draft=pair.draft,
                place=self._places[name],
                port=self.run.port(),
                algorithm=pair.algorithm,
            )
            for name, pair in self._pairs.items()
        }
        return self._by_key(starts)

    def _launch_wide(self) -> dict[str, Server]:
        target, draft = self._models / "wide", self._models / "wide-draft"
        write_wide(target, TARGET_LAYERS)
        write_wide(draft, DRAFT_LAYERS)
        starts = {
            store: Start(
                name=f"{store} wide",
                model=target,
                draft=draft,
                place=self._wide_places[store],
                port=self.run.port(),
                device_tokens=12288,
            )
            for store in self._stores
        }
        return self._by_key(starts)

    def _by_key(self, starts: dict[str, Start]) -> dict[str, Server]:
        made = self.run.launch(starts.values())
        return {key: made[start.name] for key, start in starts.items()}

    def _ready(self, servers: dict[str, Server]) -> dict[str, Server]:
        by_name = {server.start.name: key for key, server in servers.items()}
        found = self.run.ready({name: servers[key] for name, key in by_name.items()})
        return {by_name[name]: server for name, server in found.items()}

    def _measurement(self, name: str) -> AcceptLength:
        return self._eagles.get(name, self._small)

    def _store(self, name: str) -> str:
        return self._places[name].store

    def _cold(self, name: str, server: Server) -> None:
        accept = self._measurement(name)
        accept.warm_up(server)
        accept.measure(COLD, server, self._store(name))
        server.flush()

    def _restarted(self, name: str, server: Server) -> None:
        accept = self._measurement(name)
        accept.warm_up(server)
        accept.measure(RESTARTED, server, self._store(name))
        server.flush()

    def _without_drafts(self, name: str, server: Server) -> None:
        place: Place = self._places[name]
        server.flush()
        for stage, pairing in ((BEST_EFFORT, "best_effort"), (REQUIRED, "required")):
            server.detach()
            deleted = delete_pages(place, drafts=True)
            self.run.add("deleted", store=place.store, stage=stage, draft_pages=deleted)
            server.attach(pairing=pairing)
            self._small.measure(stage, server, place.store)
            server.flush()
        self._small.measure(HEALED, server, place.store)
        server.flush()
