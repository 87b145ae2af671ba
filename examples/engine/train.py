"""Train a pair from nothing: first the target, then its draft head.

    python examples/engine/train.py --kind mha --out DIR --seconds 500 --text FOLDER...

The target learns to copy documents of its context. The head learns to guess what its target will
say, unrolled over its own outputs as when guessing. `--tokenizer` makes tokenizer.json
instead. A GPU is used where there is one; on a CPU only tiny runs make sense.

Shapes: B sequences, T tokens, N chains a sequence, C hidden size, F fused layers, H heads, D head
size, V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import Batch, Batches, read_texts, train_tokenizer
from layers import rotation
from model import (
    DraftConfig,
    EagleHead,
    NoCache,
    Target,
    TargetConfig,
    load_pair,
    load_tokenizer,
    save_pair,
)
from torch import Tensor, nn
from torch.nn import functional

GUESSES = 7
# share of the time, then tokens of a sequence, sequences, shortest and longest document
Phase = tuple[float, int, int, int, int]
TARGET_PHASES: list[Phase] = [
    (0.10, 128, 192, 16, 72),
    (0.15, 512, 64, 32, 320),
    (0.45, 2304, 16, 64, 1200),
    (0.30, 2688, 16, 400, 2100),
]
DRAFT_PHASES: list[Phase] = [
    (0.15, 512, 64, 32, 320),
    (0.45, 2304, 16, 64, 1200),
    (0.40, 2688, 12, 400, 2100),
]


@dataclass(frozen=True)
class Plan:
    """How one model is trained."""

    phases: list[Phase]
    seconds: float
    rate: float  # the highest learning rate


def schedule(plan: Plan, batches: Batches) -> Iterator[tuple[float, Batch]]:
    """Yield (part of the time gone, batch) until the time is over."""
    started, whole = time.monotonic(), sum(phase[0] for phase in plan.phases)
    while (gone := (time.monotonic() - started) / plan.seconds) < 1:
        until = 0.0
        for share, tokens, rows, shortest, longest in plan.phases:
            until += share / whole
            if gone < until:
                yield gone, batches.draw(rows, tokens, shortest, longest)
                break


class Trainer:
    """AdamW with a short warm-up and a linear decay over the time given."""

    def __init__(self, module: nn.Module, rate: float) -> None:
        self.module, self.rate, self.steps = module, rate, 0
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01
        )

    def step(self, loss: Tensor, gone: float) -> None:
        """One update; `gone` is the part of the time that is over."""
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1, self.steps / 100) * max(0.01, 1 - gone)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()


def copied(batch: Batch, tokens: int, ahead: int) -> Tensor:
    """Where the token `ahead` places on can be copied, (B, tokens) of bool."""
    position = torch.arange(tokens, device=batch.tokens.device)
    return position + ahead >= batch.document_tokens + 3


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Loss of each place: scores (..., V) and labels (...) to (...)."""
    flat = functional.cross_entropy(
        scores.float().flatten(0, -2), labels.flatten(), reduction="none"
    )
    return flat.view(labels.shape)


def train_target(target: Target, batches: Batches, plan: Plan) -> None:
    """Next-token prediction; places that can be copied weigh ten times as much as the others."""
    trainer = Trainer(target, plan.rate)
    started, shown = time.monotonic(), 0.0
    for gone, batch in schedule(plan, batches):
        tokens, labels = batch.tokens[:, :-1], batch.tokens[:, 1:]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            scores = target.logits(target(tokens, positions, NoCache()).last)
        losses, here = cross_entropy(scores, labels), copied(batch, tokens.shape[1], 1)
        weight = torch.where(here, 1.0, 0.1)
        trainer.step((losses * weight).sum() / weight.sum(), gone)
        if gone >= shown:
            shown += 0.04
            right = (scores.argmax(-1) == labels)[here].float().mean()
            print(
                f"target {time.monotonic() - started:5.0f} s  step {trainer.steps:6d}  "
                f"T {tokens.shape[1]:4d}  loss copied {losses[here].mean():.4f} "
                f"new {losses[~here].mean():.3f}  copied right {right:.4f}",
                flush=True,
            )


class RecordingCache(NoCache):
    """Hands the rows of the one layer on, and keeps them."""

    def update(self, layer: int, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the arguments."""
        self.rows = k, v
        return k, v


def chain_attention(
    q: Tensor, start: Tensor, rows: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of one guess of each chain: `q` (B, N, H, D) to (B, N, H * D).

    A chain that starts after entry `start` (B, N) sees the `rows` (B, T, H, D) up to there, made
    from the target's states, and then its `own` rows (B, N, H, D), made from its own outputs.
    """
    keys, values = rows
    seen = torch.arange(keys.shape[1], device=q.device) <= start[..., None]
    scores = torch.einsum("bnhd,bthd->bhnt", q, keys).masked_fill(~seen[:, None], -torch.inf)
    mine = torch.stack([(q * k).sum(-1).transpose(1, 2) for k, _ in own], dim=-1)
    weights = torch.cat((scores.float(), mine.float()), -1).mul(q.shape[-1] ** -0.5).softmax(-1)
    weights = weights.to(values.dtype)
    total = keys.shape[1]
    out = torch.einsum("bhnt,bthd->bnhd", weights[..., :total], values)
    for index, (_, v) in enumerate(own):
        out = out + weights[..., total + index].transpose(1, 2)[..., None] * v
    return out.flatten(-2)


def draft_losses(
    head: EagleHead, features: Tensor, said: Tensor, batch: Batch, chains: int
) -> tuple[Tensor, Tensor]:
    """Mean loss and accuracy of each of the `GUESSES` guesses, (GUESSES,) each.

    `features` (B, T, F * C) and `said` (B, T), the target's choice after each token. Guess 0 is
    taken at every entry; `chains` entries of each sequence are followed by the other guesses.
    """
    tokens = batch.tokens
    entries = tokens.shape[1] - 1
    hidden, cache = head.fuse(features[:, :-1]).float(), RecordingCache()
    output = head(tokens[:, 1:], hidden, torch.arange(entries, device=tokens.device), cache)
    scores, labels, here = head.logits(output), said[:, 1:], copied(batch, entries, 2)
    losses = [cross_entropy(scores, labels)[here].mean()]
    right = [(scores.argmax(-1) == labels)[here].float().mean()]

    rows = cache.rows
    first = batch.document_tokens + 2
    room = entries - GUESSES - first
    start = first + (torch.rand(len(tokens), chains, device=tokens.device) * room).long()
    hidden = output.gather(1, start[..., None].expand(-1, -1, output.shape[-1]))
    own: list[tuple[Tensor, Tensor]] = []
    for guess in range(1, GUESSES):
        entry = start + guess
        by = rotation(entry, head.config.rope_dim, head.config.rope_theta)
        q, k, v = head.attention.project(head.inputs(tokens.gather(1, entry + 1), hidden), by)
        own.append((k, v))
        hidden = head.finish(hidden, head.attention.o(chain_attention(q, start, rows, own)))
        scores, labels = head.logits(hidden), said.gather(1, entry + 1)
        losses.append(cross_entropy(scores, labels).mean())
        right.append((scores.argmax(-1) == labels).float().mean())
    return torch.stack(losses), torch.stack(right)


def train_draft(head: EagleHead, target: Target, batches: Batches, plan: Plan, chains: int) -> None:
    """Train the head on what its target says, only where that can be copied."""
    trainer = Trainer(head, plan.rate)
    started, shown = time.monotonic(), 0.0
    for gone, batch in schedule(plan, batches):
        tokens = batch.tokens
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            with torch.no_grad():
                states = target(tokens, positions, NoCache())
                said = target.logits(states.last).argmax(-1)
            losses, right = draft_losses(head, states.features, said, batch, chains)
        trainer.step(losses.mean(), gone)
        if gone >= shown:
            shown += 0.04
            print(
                f"draft {time.monotonic() - started:5.0f} s  step {trainer.steps:6d}  "
                f"T {tokens.shape[1]:4d}  loss {losses.mean():.4f}  guesses right "
                + " ".join(f"{r:.3f}" for r in right.tolist()),
                flush=True,
            )


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("mha", "mla"), default="mha")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder, or the file")
    parser.add_argument("--text", nargs="+", required=True, help="folders with text files")
    parser.add_argument("--seconds", type=float, default=500, help="training time of both models")
    parser.add_argument("--target-share", type=float, default=0.5, help="the target's part of it")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--resume", type=Path, help="start from the pair in this folder")
    parser.add_argument(
        "--text-bytes", type=int, default=40_000_000, help="most text to read of code"
    )
    parser.add_argument("--chains", type=int, default=256, help="unrolled entries of a sequence")
    parser.add_argument("--tokenizer", action="store_true", help="train the tokenizer, not a pair")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    texts = list(read_texts(args.text, args.text_bytes, args.seed))
    if args.tokenizer:
        train_tokenizer((text for _, text in texts), TargetConfig.vocab).save(str(args.out))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches = Batches(texts, load_tokenizer(), device, args.seed)
    print(
        f"{device}, torch {torch.__version__}, tokens of text {batches.stream_tokens}", flush=True
    )
    if args.resume:
        target, head, _ = load_pair(args.resume)
    else:
        target = Target(TargetConfig(attention=args.kind))
        head = EagleHead(DraftConfig(), target.embedding)
    target.to(device).requires_grad_(True)
    head.to(device).requires_grad_(True)
    # a trained pair needs no short sequences
    target_phases = TARGET_PHASES[2:] if args.resume else TARGET_PHASES
    draft_phases = DRAFT_PHASES[1:] if args.resume else DRAFT_PHASES
    target_seconds = args.seconds * args.target_share
    if target_seconds > 0:
        train_target(target, batches, Plan(target_phases, target_seconds, args.rate))
    with torch.no_grad():  # the head must learn from the target as it is stored
        for weight in target.requires_grad_(False).parameters():
            weight.copy_(weight.bfloat16().float())
    plan = Plan(draft_phases, args.seconds - target_seconds, args.rate)
    train_draft(head, target, batches, plan, args.chains)
    save_pair(args.out, target, head)


if __name__ == "__main__":
    main()
