"""Greedy speculation with contiguous caches: what the paged engine must equal, and its figures.

    python examples/engine/reference.py --pair mha --prompt FILE... [--lose-draft]

Each step the head guesses `GUESSES` tokens one after the other, and the target verifies them in one
forward call over the last committed token and the guesses. It emits the guesses that the target
would have said itself, and one token more: 1 to GUESSES + 1 tokens. The accept length is the mean
number of tokens emitted a step.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from model import ContiguousCache, EagleHead, Target, copy_prompt, load_pair
from torch import Tensor

GUESSES = 7
PAGE_TOKENS = 64


@dataclass
class Generation:
    """What was generated for one prompt, and how."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0  # verify steps; the first token comes from the prefill
    margins: list[float] = field(default_factory=list)  # best score less second best, each token
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def accept_length(self) -> float:
        """Mean number of tokens emitted a verify step."""
        return (len(self.tokens) - 1) / max(1, self.steps)

    def emit(self, scores: Tensor, count: int) -> list[int]:
        """Take the best tokens of the first `count` rows of `scores` (T, V)."""
        best = scores[:count].topk(2)
        self.margins += (best.values[:, 0] - best.values[:, 1]).tolist()
        said = best.indices[:, 0].tolist()
        self.tokens += said
        return said


def guess(
    head: EagleHead, output: Tensor, position: int, kv: ContiguousCache, count: int = GUESSES
) -> list[int]:
    """Guess `count` tokens from the head's last `output` (1, C), the entry before `position`.

    Leaves the rows of the guessed entries in `kv`; the caller truncates them.
    """
    guesses: list[int] = []
    for index in range(count):
        token = head.logits(output).argmax(-1)  # (1,)
        guesses.append(int(token))
        if index < count - 1:
            output = head(token, output, torch.tensor([position + index]), kv)
    return guesses


@torch.inference_mode()
def generate(
    target: Target,
    head: EagleHead,
    prompt: list[int],
    new_tokens: int,
    *,
    lose_draft: bool = False,
    guesses: int = GUESSES,
) -> Generation:
    """Continue `prompt` by `new_tokens` tokens or a few more.

    `lose_draft` zeroes the draft's KV rows of the whole pages that a cache would have restored,
    as when only the target's pages come back: all but the prompt's last page, whole or not.
    With `guesses` = 0 the target decodes alone.
    """
    out = Generation()
    target_kv, draft_kv = ContiguousCache(target.config.layers), ContiguousCache(1)
    started = time.perf_counter()
    states = target(torch.tensor(prompt), torch.arange(len(prompt)), target_kv)
    said = out.emit(target.logits(states.last[-1:]), 1)

    following = torch.tensor(prompt[1:] + said)
    hidden = head.fuse(states.features)
    restored = (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
    if restored:
        head(following[:restored], hidden[:restored], torch.arange(restored), draft_kv)
    if lose_draft:
        draft_kv.zero(0, restored)
    rest = torch.arange(restored, len(prompt))
    output = head(following[restored:], hidden[restored:], rest, draft_kv)
    out.prefill_s = time.perf_counter() - started

    length = len(prompt)  # tokens with rows in the caches; the last token said has none yet
    while len(out.tokens) < new_tokens:
        guessed = guess(head, output[-1:], length, draft_kv, guesses) if guesses else []
        tokens = torch.tensor([said[-1], *guessed])
        positions = torch.arange(length, length + len(tokens))
        states = target(tokens, positions, target_kv)
        scores = target.logits(states.last)
        choices = scores.argmax(-1).tolist()
        accepted = 0
        while accepted < len(guessed) and guessed[accepted] == choices[accepted]:
            accepted += 1
        said = out.emit(scores, accepted + 1)
        out.steps += 1

        draft_kv.truncate(length)
        length += accepted + 1
        target_kv.truncate(length)
        # the accepted tokens' rows again, now from the target's states
        hidden = head.fuse(states.features[: accepted + 1])
        output = head(torch.tensor(said), hidden, positions[: accepted + 1], draft_kv)
    out.decode_s = time.perf_counter() - started - out.prefill_s
    return out


def main() -> None:
    """Print a line for each prompt file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="mha", help="a pair under checkpoints/, or a folder")
    parser.add_argument("--prompt", nargs="+", type=Path, required=True, help="text files")
    parser.add_argument("--prompt-tokens", type=int, default=1100)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--lose-draft", action="store_true", help="zero the draft's prompt rows")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the tensors are small; on a busy machine two threads are far slower
    shipped = Path(__file__).parent / "checkpoints" / args.pair
    target, head, tokenizer = load_pair(shipped if shipped.is_dir() else args.pair)
    print("accept length  copied  as alone  least margin  prefill s  ms a step  tokens  text")
    for path in args.prompt:
        document = tokenizer.encode(path.read_text(encoding="utf-8")).ids
        prompt = copy_prompt(document, args.prompt_tokens)
        if len(prompt) <= args.new_tokens:
            raise SystemExit(f"{path} has {len(document)} tokens: too few to copy --new-tokens of")
        out = generate(target, head, prompt, args.new_tokens, lose_draft=args.lose_draft)
        alone = generate(target, head, prompt, len(out.tokens), guesses=0)
        want = document[24 : 24 + len(out.tokens)]
        copied = sum(a == b for a, b in zip(out.tokens, want, strict=False)) / len(want)
        print(
            f"{out.accept_length:13.2f}  {copied:6.3f}  {out.tokens == alone.tokens!s:>8}  "
            f"{min(out.margins):12.2f}  {out.prefill_s:9.2f}  "
            f"{1000 * out.decode_s / out.steps:9.1f}  {len(prompt):6d}  {path.name}",
            flush=True,
        )


if __name__ == "__main__":
    main()
