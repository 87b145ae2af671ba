"""The conformance kit: the backend contract as numbered clauses that can be run.

`BackendContract` needs pytest, `stateful` needs hypothesis; everything else needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .clause import Clause, ClauseFailed
from .running import Outcome, run_clauses
from .subject import Subject

if TYPE_CHECKING:
    from .contract import BackendContract

__all__ = ["BackendContract", "Clause", "ClauseFailed", "Outcome", "Subject", "run_clauses"]


def __getattr__(name: str) -> Any:
    if name == "BackendContract":
        from .contract import BackendContract

        return BackendContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
