"""A request: its tokens, its pages while it runs, and what it measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paged import PageTable
from torch import Tensor

OnTokens = Callable[["Request", list[int]], None]


@dataclass
class Measures:
    """What a request's way through the engine was like. Times are `time.perf_counter` seconds."""

    submitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    steps: int = 0  # verify steps
    verified_tokens: int = 0  # that these steps yielded, cut off ones included
    device_tokens: int = 0  # prompt tokens found in the device pool
    host_tokens: int = 0  # in the host pool
    storage_tokens: int = 0  # in storage
    draft_hits: int = 0  # restored pages that came with their draft
    lost_drafts: int = 0  # restored pages whose draft was lost: zeros stand in for it

    @property
    def accept_length(self) -> float:
        """Mean tokens a verify step; 0.0 before the first step."""
        return self.verified_tokens / self.steps if self.steps else 0.0

    @property
    def time_to_first_token_s(self) -> float:
        """From submission."""
        return self.first_token_s - self.submitted_s


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    The known tokens are the prompt and the output. The first `done` of them have target and draft
    rows; while it decodes these are all but the last one, and `output_state` is the draft's last
    output, from which it guesses on.
    """

    id: str
    prompt: list[int]
    new_tokens: int
    stop: frozenset[int]
    on_tokens: OnTokens | None
    hashes: list[str]  # of the prompt's whole pages
    pages_needed: int
    tokens: Tensor  # the prompt on the models' device, (T,)
    measures: Measures = field(default_factory=Measures)
    output: list[int] = field(default_factory=list)
    done: int = 0
    lease: Any = None  # hicache_storage.hicache: the cached pages that it holds
    table: PageTable | None = None
    own: Tensor | None = None  # its device pages that are not the cache's, behind the lease's
    output_state: Tensor | None = None  # (1, C)
    finished: bool = False
    error: Exception | None = None

    @property
    def known(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    def take(self, said: list[int]) -> None:
        """Append what the target said, up to the limit or a stop token, and hand it on."""
        new = said[: self.new_tokens - len(self.output)]
        stop = next((i for i, token in enumerate(new) if token in self.stop), None)
        self.finished = stop is not None or len(self.output) + len(new) == self.new_tokens
        new = new[:stop]
        self.measures.last_token_s = time.perf_counter()
        if not self.measures.first_token_s:
            self.measures.first_token_s = self.measures.last_token_s
        self.output += new
        if new and self.on_tokens is not None:
            self.on_tokens(self, new)
