"""Accept length: cold, after a restart, and after draft pages are deleted."""

from __future__ import annotations

from hicache_storage.keys import HashMode, page_hashes

from .run import Run
from .server import Answer, Server

PROMPT_TOKENS, NEW_TOKENS = 1024, 400
COLD, RESTARTED = "cold", "restarted"
BEST_EFFORT, REQUIRED, HEALED = "drafts deleted, best_effort", "drafts deleted, required", "healed"


class AcceptLength:
    """Asks servers to continue one prompt, and keeps what they said when it was new to them."""

    def __init__(self, run: Run, pair: str, prompt: list[int], warm: list[int]) -> None:
        self.run = run
        self.pair = pair
        self.prompt = prompt
        self.warm = warm
        self._said: dict[str, Answer] = {}

    def warm_up(self, server: Server) -> None:
        """Another prompt, so that nothing is compiled while the first is measured."""
        server.generate(self.warm, 16)

    def measure(self, stage: str, server: Server, store: str) -> Answer:
        """One request; a row. The text is compared with the store's first one."""
        answer = server.generate(self.prompt, NEW_TOKENS)
        cold = self._said.setdefault(store, answer)
        self.run.add(
            "accept",
            pair=self.pair,
            store=store,
            stage=stage,
            ranks=server.start.ranks,
            accept_length=answer.accept_length and round(answer.accept_length, 3),
            from_storage=answer.from_storage,
            cached=answer.cached,
            same_text=answer.tokens == cold.tokens,
            tokens=len(answer.tokens),
            first_token_s=round(answer.first_token_s, 4),
            seconds=round(answer.seconds, 3),
        )
        return answer

    def hashes(self, page_size: int, mode: HashMode) -> list[str]:
        """The page hashes of the prompt's whole pages that a server can read back."""
        return page_hashes(self.prompt, page_size, mode=mode)[: (PROMPT_TOKENS - 1) // page_size]
