"""Agreement: all ranks go on with the least that any of them has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..errors import ConfigError

Least = Callable[[Sequence[int]], Sequence[int]]
"""Takes a rank's numbers and returns, on every rank, the least of each over all ranks."""


class Agreement:
    """`group` is a torch.distributed group of CPU tensors (gloo), a `Least`, or None for a
    single rank.

    A collective hangs unless every rank enters it, so one is entered only where all ranks must
    be: the callers look at agreed values and their arguments, never at what this rank has.
    """

    def __init__(self, group: dist.ProcessGroup | Least | None) -> None:
        self.shared = group is not None
        if group is None:
            self._least: Least = lambda values: values
        elif dist.is_available() and isinstance(group, dist.ProcessGroup):
            self._least = _over(group)
        elif callable(group):
            self._least = group
        else:
            raise ConfigError(
                "group must be a torch.distributed group, a callable that takes and returns a "
                f"list of numbers, or None; got {type(group).__name__}"
            )

    def least(self, value: int) -> int:
        """The least `value` of all ranks."""
        return int(self._least([value])[0])

    def any(self, value: bool) -> bool:
        """Whether `value` is true on any rank."""
        return self.least(-int(value)) < 0


def _over(group: dist.ProcessGroup) -> Least:
    def least(values: Sequence[int]) -> Sequence[int]:
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=group)
        return [int(number) for number in numbers.tolist()]

    return least
