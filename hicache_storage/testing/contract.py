"""BackendContract: the clauses as pytest tests of one backend.

    class TestMine(BackendContract):
        url = "mine://{tmp_path}/pages"

Needs pytest; `hicache-storage check` runs the same clauses without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ..store import Store
from .clause import Clause, ClauseFailed, NotSelected
from .clauses import CLAUSES
from .running import DEFAULT_TIMEOUT_S, check_deviations, probe, run_clause, unmet
from .subject import Subject, Where


class Sealed(type):
    """Keeps the clauses of a suite as they are."""

    def __init__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> None:
        super().__init__(name, bases, members)
        if not any(isinstance(base, Sealed) for base in bases):
            return  # BackendContract itself
        for sealed in SEALED:
            if inspect.getattr_static(cls, sealed, None) is not BackendContract.__dict__[sealed]:
                raise TypeError(_refusal(name, sealed))
        try:
            check_deviations(getattr(cls, "deviations", {}))
        except ValueError as error:
            raise TypeError(f"{name}: {error}") from error

    def __setattr__(cls, name: str, value: object) -> None:
        if name in SEALED:
            raise TypeError(_refusal(cls.__name__, name))
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        if name in SEALED:
            raise TypeError(_refusal(cls.__name__, name))
        super().__delattr__(name)


class BackendContract(metaclass=Sealed):
    """A suite with one test for every clause. Subclass it, and say which store to test.

    Set `url`, or define `make`, or override the fixture `where`. The location must be a new and
    empty one for every test. A subclass can't override or remove a clause: what a backend
    knowingly does otherwise it declares in `deviations`.
    """

    url: ClassVar[Where] = ""
    """A store URL or mapping; "{tmp_path}" stands for a new directory."""
    deviations: ClassVar[Mapping[str, str]] = {}
    """Clause number -> reason. The clause is expected to fail, and must."""
    timeout_s: ClassVar[float] = DEFAULT_TIMEOUT_S
    """Limit for each clause."""

    def make(self, tmp_path: Path) -> Where:
        """URL or mapping of a new, empty store."""
        if not self.url:
            raise TypeError(f"{type(self).__name__} must set url or define make(self, tmp_path)")
        if isinstance(self.url, str):
            return self.url.format(tmp_path=tmp_path)
        return {
            name: value.format(tmp_path=tmp_path) if isinstance(value, str) else value
            for name, value in self.url.items()
        }

    def tamper(self, store: Store, key: str, stored: bytes) -> None:
        """Define it to put bytes in the place of a stored page behind the backend's back. Without
        it damage is done through the backend's own `batch_set`."""
        raise NotImplementedError

    @pytest.fixture
    def where(self, tmp_path: Path) -> Where:
        """What `make` gives; override it if making a store needs other fixtures."""
        return self.make(tmp_path)

    @pytest.fixture
    def subject(self, where: Where) -> Subject:
        own = type(self).tamper is not BackendContract.tamper
        return Subject(where, tamper=self.tamper if own else None, private=True, empty=True)


def _refusal(suite: str, name: str) -> str:
    clause = next((one for one in CLAUSES if one.test_name == name), None)
    what = f"clause {clause.number} ({name})" if clause else f"{name}, which the clauses rely on"
    return (
        f"{suite} overrides or removes {what}. Clauses can't be changed: declare "
        f'deviations = {{"{clause.number if clause else "1.1"}": "the reason"}} instead'
    )


def _test_of(clause: Clause) -> Callable[..., None]:
    def test(self: BackendContract, subject: Subject, request: pytest.FixtureRequest) -> None:
        request.node.user_properties.append(("hicache_clause", clause.number))
        reason = unmet(clause, probe(subject))
        if reason:
            pytest.skip(f"clause {clause.number} not selected: {reason}")
        deviation = self.deviations.get(clause.number)
        if deviation is not None:
            request.node.add_marker(
                pytest.mark.xfail(reason=deviation, strict=True, raises=ClauseFailed)
            )
        try:
            run_clause(clause, subject, timeout_s=self.timeout_s)
        except NotSelected as error:
            pytest.skip(f"clause {clause.number} not selected: {error}")

    test.__name__ = clause.test_name
    test.__qualname__ = f"BackendContract.{clause.test_name}"
    test.__doc__ = f"{clause.number} {clause.title}."
    test.hicache_clause = clause.number  # type: ignore[attr-defined]
    return test


for _clause in CLAUSES:
    type.__setattr__(BackendContract, _clause.test_name, _test_of(_clause))
SEALED = frozenset(clause.test_name for clause in CLAUSES) | {"subject"}
