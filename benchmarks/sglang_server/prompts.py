"""What servers are asked to continue, as token ids."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine"
BOS, SEP = 0, 1
_LEAD = 24


def copied_text(name: str, tokens: int) -> list[int]:
    """`tokens` tokens that the example's models continue by copying one of its texts."""
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "tokenizer.json"))
    text = (EXAMPLE / "prompts" / f"{name}.txt").read_text(encoding="utf-8")
    return copied(tokenizer.encode(text).ids, tokens)


def copied(document: list[int], tokens: int) -> list[int]:
    """`tokens` tokens: a document, and its beginning once more."""
    document = document[: tokens - _LEAD - 2]
    if len(document) != tokens - _LEAD - 2:
        raise ValueError(f"a prompt of {tokens} tokens needs a longer document")
    return [BOS, *document, SEP, *document[:_LEAD]]


def random_tokens(vocabulary: int, tokens: int, seed: int) -> list[int]:
    """`tokens` tokens without any sense."""
    draw = random.Random(seed)
    return [draw.randrange(2, vocabulary) for _ in range(tokens)]
