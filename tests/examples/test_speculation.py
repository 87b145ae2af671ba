"""Speculation changes how fast tokens come, never which ones."""

from __future__ import annotations

import pytest
import torch
from model import ContiguousCache
from reference import generate
from small_pairs import small_pair
from speculation import GUESSES, accepted, catch_up, guess, run_target


class CacheRows:
    """Rows in a contiguous float32 cache: what lies beyond `start` is forgotten first."""

    def __init__(self, layers: int) -> None:
        self.cache = ContiguousCache(layers, torch.float32)

    def __call__(self, start: int, stop: int) -> ContiguousCache:
        if self.cache.length:
            self.cache.truncate(start)
        assert self.cache.length == start
        return self.cache


def speculate(target, head, prompt: list[int], new_tokens: int) -> tuple[list[int], list[int]]:
    """The output and how many tokens each step yielded."""
    target_rows, draft_rows = CacheRows(target.config.layers), CacheRows(1)
    tokens = torch.tensor(prompt)
    states, said = run_target(target, target_rows, tokens, 0)
    said = said[-1:]
    output = catch_up(head, draft_rows, states.features, torch.cat((tokens[1:], said)), 0)
    out, yields, done = said.tolist(), [], len(prompt)
    while len(out) < new_tokens:
        guesses = guess(head, draft_rows, output, done)
        states, choices = run_target(target, target_rows, torch.cat((said[-1:], guesses)), done)
        said = accepted(guesses, choices)
        output = catch_up(head, draft_rows, states.features[: len(said)], said, done)
        done += len(said)
        out += said.tolist()
        yields.append(len(said))
    return out[:new_tokens], yields


def alone(target, prompt: list[int], new_tokens: int) -> list[int]:
    """Plain greedy decoding."""
    out: list[int] = []
    rows, tokens = CacheRows(target.config.layers), torch.tensor(prompt)
    while len(out) < new_tokens:
        start = len(prompt) + len(out) - len(tokens)
        tokens = run_target(target, rows, tokens, start)[1][-1:]
        out += tokens.tolist()
    return out


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_speculation_yields_the_tokens_of_plain_greedy_decoding(attention):
    all_yields = set()
    for seed in range(6):
        target, head = small_pair(attention, seed=seed)
        prompt = torch.randint(0, target.config.vocab, (13,)).tolist()
        out, yields = speculate(target, head, prompt, 60)
        assert out == alone(target, prompt, 60)
        all_yields |= set(yields)
    assert {1, 2, GUESSES + 1} <= all_yields, "no step with no, some or all guesses right"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_it_accepts_as_many_as_the_reference(attention, seed, monkeypatch):
    monkeypatch.setattr(ContiguousCache.__init__, "__defaults__", (torch.float32,))
    target, head = small_pair(attention, seed=seed)
    prompt = torch.randint(0, target.config.vocab, (13,)).tolist()
    out, yields = speculate(target, head, prompt, 60)
    expected = generate(target, head, prompt, 60)
    assert out == expected.tokens[:60]
    assert sum(yields) / len(yields) == expected.accept_length


@pytest.mark.parametrize(
    ("guesses", "said", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3], [1, 2, 9, 4], [1, 2, 9]),
        ([1, 2, 3], [9, 2, 3, 4], [9]),
        ([1, 2, 3], [1, 9, 3, 4], [1, 9]),
    ],
)
def test_guesses_count_up_to_the_first_wrong_one(guesses, said, expected):
    assert accepted(torch.tensor(guesses), torch.tensor(said)).tolist() == expected
