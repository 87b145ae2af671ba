"""Functions of a library in C, done in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class TypedCall:
    """Takes plain numbers, and pointers, of the types that it was told of."""

    argtypes: Sequence[Any] = ()

    def __init__(self, work: Callable[..., int]) -> None:
        self._work = work

    def __call__(self, *arguments: Any) -> int:
        pairs = zip(self.argtypes, arguments, strict=True)
        return self._work(
            *(kind(each).value if isinstance(each, int) else each for kind, each in pairs)
        )
