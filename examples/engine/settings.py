"""What a stage of the demo is told; apart from the stage, so that it can be read without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageSettings:
    """What a stage is to do."""

    store: str  # URL
    prompt: str  # a text file
    checkpoint: str  # folder of the pair
    pair: str
    layout: str
    tenant: str
    pairing: str
    prompt_tokens: int
    new_tokens: int
    page_size: int
    device: str
    threads: int
    fresh: bool = False  # refuse if the store has the prompt's first page already
