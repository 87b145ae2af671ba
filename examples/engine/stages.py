"""The demo's four stages on one store, and what is done to the store between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from processes import run_stage
from progress import Progress
from settings import StageSettings

from hicache_storage import Namespace, open_store
from hicache_storage.keys import draft_key


class DemoError(Exception):
    """The demo can't go on; the message says why and what to do."""


class Stages:
    """The four stages on one store, and what this process does to the store between them."""

    def __init__(self, settings: StageSettings, progress: Progress, *, verbose: bool) -> None:
        self.settings, self.progress, self.verbose = settings, progress, verbose
        self.results: dict[str, dict[str, Any]] = {}
        self.rewritten: dict[str, Any] = {}

    def run(self) -> None:
        """All stages, in order."""
        self.check_store()
        cold = self.stage("cold", "nothing stored", fresh=True)
        everything, prompt_pages = range(len(cold["hashes"])), cold["prompt_pages"]
        self.expect_drafts(prompt_pages, "the first process wrote them")

        self.stage("restored", "a new process")
        self.delete_drafts(everything)
        self.stage("draft_lost", "a new process, draft pages deleted")

        self.rewritten = self.run_process("writing the pairs again", pairing="required")
        self.progress.end(f"{self.rewritten['written_drafts']} draft pages written")
        self.expect_drafts(prompt_pages, "they were written again")
        first = prompt_pages // 2
        self.delete_drafts(sorted({first, prompt_pages - 1}))
        self.stage("required", f"a new process, draft pages {first + 1} and {prompt_pages} deleted",
                   pairing="required")  # fmt: skip

    def check_store(self) -> None:
        """Refuse a store on which the demo would not mean anything."""
        with open_store(self.settings.store) as store:
            if store.scope == "process":
                raise DemoError(
                    f"{store.name}:// ends with the process, and the demo runs several on one "
                    "store; give another one, such as --store file:///tmp/kv"
                )
            if "delete" not in store.capabilities:
                raise DemoError(
                    f"the backend {store.name!r} can't delete pages, which the demo does to lose "
                    "drafts; give another store, such as --store file:///tmp/kv"
                )

    def run_process(self, text: str, **changes: Any) -> dict[str, Any]:
        """One process over the store, waited for; leaves its line of progress open."""
        self.progress.begin(text)
        settings = replace(self.settings, **changes)
        return run_stage(settings, self.progress, verbose=self.verbose)

    def stage(self, name: str, text: str, **changes: Any) -> dict[str, Any]:
        """Run one stage and note its figures."""
        result = self.run_process(f"{label(name)}: {text}", **changes)
        output = self.results.get("cold", result)["output"]
        result |= {
            "stage": name,
            "label": label(name),
            "output_equal": result["output"] == output,
        }
        self.results[name] = result
        self.progress.end(
            f"accept length {result['accept_length']:.2f}, "
            f"{result['storage_tokens']:,} tokens from storage"
        )
        return result

    def delete_drafts(self, pages: Sequence[int]) -> None:
        """Delete the draft's pages from the store, and see that they are gone."""
        self.progress.begin(f"deleting {len(pages)} draft pages from the store")
        keys = [draft_key(self.results["cold"]["hashes"][page]) for page in pages]
        namespace = self.draft_namespace()
        with open_store(self.settings.store) as store:
            gone = store.delete(namespace, keys)
            if not all(gone) or any(store.exists(namespace, [key]) for key in keys):
                raise DemoError("the store has draft pages still that were deleted from it")
        self.progress.end("done")

    def expect_drafts(self, pages: int, why: str) -> None:
        """See that the store holds the first `pages` pages, in pairs."""
        cold = self.results["cold"]
        hashes = cold["hashes"][:pages]
        with open_store(self.settings.store) as store:
            found = store.exists(Namespace.from_record(cold["namespaces"][0].encode()), hashes)
            drafts = store.exists(self.draft_namespace(), [draft_key(page) for page in hashes])
        if min(found, drafts) < pages:
            raise DemoError(
                f"the store should hold {pages} pages with their drafts, since {why}, but it has "
                f"{found} and {drafts} drafts; is it read-only, full, or private to a process?"
            )

    def draft_namespace(self) -> Namespace:
        """The namespace of the draft's pages, as the engine wrote them."""
        return Namespace.from_record(self.results["cold"]["namespaces"][1].encode())


def label(stage: str) -> str:
    """The stage's name for people."""
    return stage.replace("_", " ")
