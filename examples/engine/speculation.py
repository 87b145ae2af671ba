"""Greedy speculation with a chain of guesses: the draft guesses, the target verifies.

After a forward call of the target over the tokens up to position n - 1, token n is known. Then

    catch_up   the draft runs its entries up to n - 1 from the target's states, and guesses n + 1
    guess      it runs on over its own output: entry n, n + 1, ... guess token n + 2, n + 3, ...
    verify     the target runs over token n and the guesses at once; each guess is right while it
               equals what the target says itself, and the target's word after the last right
               guess is the next token: 1 to GUESSES + 1 tokens a step, never a wrong one

Rows that rejected guesses wrote lie beyond the sequence's end and are overwritten by the next step.
All tensors stay on the models' device; a step waits for it once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from model import EagleHead, KVAccess, Target, TargetStates
from torch import Tensor

GUESSES = 7  # draft steps; with the token known before, a step verifies GUESSES + 1 tokens
Rows = Callable[[int, int], KVAccess]  # the KV access for positions start to stop


@torch.inference_mode()
def run_target(
    target: Target, rows: Rows, tokens: Tensor, start: int
) -> tuple[TargetStates, Tensor]:
    """Run `tokens` (T,) at `start`; returns the states and the target's choice after each, (T,)."""
    stop = start + len(tokens)
    positions = torch.arange(start, stop, device=tokens.device)
    states = target(tokens, positions, rows(start, stop))
    return states, target.logits(states.last).argmax(-1)


@torch.inference_mode()
def catch_up(
    head: EagleHead, rows: Rows, features: Tensor, next_tokens: Tensor, start: int
) -> Tensor:
    """Run the draft's entries from `start` on; returns the last one's output (1, C).

    `features` (T, F * C) are the target's at these positions and `next_tokens` (T,) the tokens
    one position later: the entry of a page's last token needs the first token after the page.
    """
    stop = start + len(next_tokens)
    positions = torch.arange(start, stop, device=next_tokens.device)
    output = head(next_tokens, head.fuse(features), positions, rows(start, stop))
    return output[-1:]


@torch.inference_mode()
def guess(head: EagleHead, rows: Rows, output: Tensor, start: int) -> Tensor:
    """`GUESSES` tokens (GUESSES,) that follow, from the `output` (1, C) of entry `start` - 1."""
    guesses = [head.logits(output).argmax(-1)]
    for entry in range(start, start + GUESSES - 1):
        position = torch.arange(entry, entry + 1, device=output.device)
        output = head(guesses[-1], output, position, rows(entry, entry + 1))
        guesses.append(head.logits(output).argmax(-1))
    return torch.cat(guesses)


def accepted(guesses: Tensor, said: Tensor) -> Tensor:
    """The tokens (1 to GUESSES + 1,) that a step yields.

    `said` (GUESSES + 1,) is the target's choice after the known token and after each guess.
    """
    right = (guesses == said[:-1]).long().cumprod(0).sum()
    return said[: int(right) + 1]
