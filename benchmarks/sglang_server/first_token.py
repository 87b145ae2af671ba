"""Time to first token from storage, of several servers in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .run import Run
from .server import Answer, Server
from .stores import BUILT_IN


def store_prompts(run: Run, servers: dict[str, Server], prompts: Sequence[list[int]]) -> None:
    """Has every server compute and store the prompts, which it then forgets."""

    def store(_name: str, server: Server) -> None:
        for prompt in prompts:
            server.generate(prompt, 1)
        server.flush()

    run.for_each(servers, store)


def compare(
    run: Run,
    model: str,
    servers: dict[str, Server],
    prompt: list[int],
    *,
    page_size: int,
    rounds: int,
    least_left_s: float,
) -> None:
    """A round to warm up and `rounds` more: all servers forget, then one after the other is asked.

    The order turns from round to round. A time counts if the whole prefix came from storage, for
    the comparison if that is so of SGLang's file backend in the same round too. `servers` by store.
    A row a round, and one for each store. Stops early when less than `least_left_s` is left.
    """
    wanted = (len(prompt) - 1) // page_size * page_size
    asked = dict(servers)
    seconds: dict[str, list[float]] = {store: [] for store in servers}
    beside: dict[str, list[tuple[float, float]]] = {store: [] for store in servers}
    for number in range(rounds + 1):
        if run.left_s < least_left_s:
            run.add("failure", what=f"first token, {model}", why=f"no time after {number} rounds")
            break
        run.for_each(asked, lambda _store, server: server.flush())
        found = {store: _ask(run, asked, store, prompt) for store in _turned(list(asked), number)}
        answers = {store: answer for store, answer in found.items() if answer is not None}
        run.add(
            "first token round",
            model=model,
            prompt_tokens=len(prompt),
            round=number,
            seconds={store: round(a.first_token_s, 4) for store, a in answers.items()},
            from_storage={store: a.from_storage for store, a in answers.items()},
        )
        took = {s: a.first_token_s for s, a in answers.items() if a.from_storage == wanted}
        for store, time_s in took.items() if number else ():
            seconds[store].append(time_s)
            if BUILT_IN in took:
                beside[store].append((time_s, took[BUILT_IN]))
    for store in servers:
        if seconds[store]:
            run.add("first token", model=model, store=store, prompt_tokens=len(prompt),
                    **summary(seconds[store], beside[store]))  # fmt: skip


def summary(seconds: Sequence[float], beside: Sequence[tuple[float, float]]) -> dict[str, object]:
    """The median of the times and, of rounds with both stores' times, the ratio of the medians and
    the quartiles of the rounds' own ratios."""
    found: dict[str, object] = {
        "rounds": len(seconds),
        "median_s": round(statistics.median(seconds), 4),
    }
    if beside:
        ours, theirs = (statistics.median(times) for times in zip(*beside, strict=True))
        found["ratio"] = round(ours / theirs, 3)
    if len(beside) > 1:
        ratios = [ours / theirs for ours, theirs in beside]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found["quartiles"] = [round(low, 3), round(high, 3)]
    return found


def _ask(run: Run, servers: dict[str, Server], store: str, prompt: list[int]) -> Answer | None:
    """The answer of one store's server; None if it fails, and then it is asked no more."""
    answers: list[Answer] = []
    if not run.tried(
        f"{store}, first token", lambda: answers.append(servers[store].generate(prompt, 1))
    ):
        del servers[store]
        return None
    return answers[0]


def _turned(stores: list[str], number: int) -> list[str]:
    turn = number % max(1, len(stores))
    return stores[turn:] + stores[:turn]
