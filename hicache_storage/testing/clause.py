"""Clauses: the backend contract as a numbered list of rules, each with the code that tries it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bench import Bench

NEEDS = {
    "delete": "the hook `delete`",
    "scan": "the hook `scan`",
    "usage": "the hook `usage`",
    "flush": "the hook `flush`",
    "clear": "the hook `clear`",
    "persistent": 'a scope other than "process": pages survive closing',
    "shared": 'scope "shared": several processes use the store at once',
    "capacity": "an option `capacity` in bytes, and a `usage` that reports it",
    "empty": "a store that holds nothing (or --destructive)",
    "private": "a store that nobody else uses (or --destructive)",
    "named": "a store that `open_store` opens by its URL or mapping",
    "secrets": "an option declared secret, with a text of 6 characters or more",
}
"""What a clause may ask for besides the three required hooks, in words for reports."""


class ClauseFailed(AssertionError):
    """A backend broke the clause; the message says what was expected and what was found."""


class NotSelected(Exception):
    """The clause can't be tried after all, for the reason that the message gives."""


@dataclass(frozen=True)
class Clause:
    """One rule of the contract."""

    number: str
    """As in the docs: "section.rule"."""
    title: str
    """The rule in one sentence, without a full stop."""
    prose: str
    """The rule in full, as the docs give it."""
    needs: tuple[str, ...]
    """Keys of NEEDS: without one of them the clause doesn't apply."""
    try_on: Callable[[Bench], None]
    """Raises if the backend breaks the rule."""

    @property
    def test_name(self) -> str:
        """Name of the test that guards it."""
        words = re.sub(r"[^a-z0-9]+", "_", self.title.lower()).strip("_")
        return f"test_{self.number.replace('.', '_')}_{words}"

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(map(int, self.number.split(".")))


_REGISTERED: dict[str, Clause] = {}


def clause(
    number: str, title: str, *, needs: Iterable[str] = ()
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Makes a function of a Bench a clause; its docstring is the clause's prose."""

    def register(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        prose = inspect.cleandoc(function.__doc__ or "")
        unknown = set(needs) - set(NEEDS)
        if number in _REGISTERED or not prose or unknown:
            raise ValueError(f"clause {number}: number taken, no prose, or unknown need {unknown}")
        _REGISTERED[number] = Clause(number, title, prose, tuple(needs), function)
        return function

    return register


def registered() -> tuple[Clause, ...]:
    """The clauses registered so far, by number."""
    return tuple(sorted(_REGISTERED.values(), key=lambda one: one.order))


def expect(condition: bool, message: str) -> None:
    """Raises ClauseFailed with `message` unless the condition holds; also under `python -O`."""
    if not condition:
        raise ClauseFailed(message)


def expect_equal(found: Any, wanted: Any, what: str) -> None:
    """Raises ClauseFailed unless `found` equals `wanted` in value and type."""
    if type(found) is not type(wanted) or found != wanted:
        raise ClauseFailed(f"{what}: expected {_short(wanted)}, found {_short(found)}")


def _short(value: Any) -> str:
    if isinstance(value, list) and value and all(type(one) is bool for one in value):
        return "".join("T" if one else "F" for one in value)
    if isinstance(value, (bytes, bytearray)) and len(value) > 24:
        return f"{bytes(value[:24])!r}... of {len(value)} bytes"
    return f"{value!r:.200}"
