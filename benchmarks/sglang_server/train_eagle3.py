"""Trains a small target that copies and an EAGLE3 head for it, from nothing.

    python -m benchmarks.sglang_server.train_eagle3 OUT --seconds 100

The classes and losses are the example's (`examples/engine`); the documents are random tokens, so
nothing but copying is learned, and no text is needed. OUT is what the program beside this takes as
`--pair`. Two minutes on a data-centre GPU; `--tiny` shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .prompts import BOS, EXAMPLE, SEP, copied, random_tokens

sys.path.append(str(EXAMPLE))

import reference
import train
from corpus import Batch
from model import DraftConfig, EagleHead, Target, TargetConfig, save_pair

VOCABULARY = 1024
PROMPT_TOKENS, NEW_TOKENS = 1024, 400
# share of the time, tokens of a sequence, sequences, shortest and longest document
TARGET_PHASES: list[train.Phase] = [
    (0.2, 128, 192, 16, 72),
    (0.2, 512, 64, 32, 320),
    (0.6, 1536, 28, 64, 1200),
]
DRAFT_PHASES: list[train.Phase] = [(0.2, 512, 64, 32, 320), (0.8, 1536, 20, 64, 1200)]
TINY_PHASES: list[train.Phase] = [(1.0, 48, 32, 6, 20)]


class RandomDocuments:
    """Draws sequences [BOS] document [SEP] document ... of random tokens, as `corpus.Batches`."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, rows: int, tokens: int, shortest: int, longest: int) -> Batch:
        """`rows` sequences of `tokens` tokens with documents of `shortest` to `longest`."""
        size = self._integers(shortest, longest + 1, rows, 1)
        document = self._integers(2, VOCABULARY, rows, longest)
        at = (torch.arange(tokens, device=self.device).expand(rows, tokens) - 1) % (size + 1)
        x = torch.where(at == size, SEP, document.gather(1, at.clamp(max=longest - 1)))
        x[:, 0] = BOS
        return Batch(x, size)

    def _integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)


def train_pair(
    seconds: float,
    target_share: float,
    *,
    rate: float = 2e-3,
    tiny: bool = False,
    seed: int = 0,
) -> tuple[Target, EagleHead]:
    """A trained pair, on the CPU. EAGLE3 reads a target's states after its first three layers."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, inner = (64, 128) if tiny else (256, 512)
    sizes = TargetConfig(
        vocab=VOCABULARY, hidden=hidden, inner=inner, layers=4, feature_layers=(1, 2, 3)
    )
    target = Target(sizes).to(device)
    head = EagleHead(DraftConfig(hidden=hidden, inner=inner), target.embedding).to(device)
    documents = RandomDocuments(device, seed)
    plan = train.Plan(TINY_PHASES if tiny else TARGET_PHASES, seconds * target_share, rate)
    train.train_target(target, documents, plan)  # type: ignore[arg-type]
    with torch.no_grad():  # the head must learn from the target as it is stored
        for weight in target.requires_grad_(False).parameters():
            weight.copy_(weight.bfloat16().float())
    plan = train.Plan(TINY_PHASES if tiny else DRAFT_PHASES, seconds * (1 - target_share), rate)
    train.train_draft(head, target, documents, plan, 8 if tiny else 256)  # type: ignore[arg-type]
    return target.cpu().eval(), head.cpu().eval()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the pair")
    parser.add_argument("--seconds", type=float, default=100.0, help="of training, both models")
    parser.add_argument("--target-share", type=float, default=0.6, help="the target's part of it")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU; it won't copy")
    options = parser.parse_args(argv)
    target, head = train_pair(options.seconds, options.target_share, tiny=options.tiny)
    save_pair(options.out, target, head)
    if options.tiny:
        return
    prompt = copied(random_tokens(VOCABULARY, PROMPT_TOKENS, 1), PROMPT_TOKENS)
    for lost in (False, True):
        found = reference.generate(target, head, prompt, NEW_TOKENS, lose_draft=lost)
        print(
            f"accept length {found.accept_length:.2f}{' without the drafts' if lost else ''}, "
            f"least margin {min(found.margins):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
