"""A backend's mistakes are found when it registers, and its answers are checked at every call."""

from __future__ import annotations

import functools
from typing import Any

import pluggy
import pytest

from hicache_storage import BackendError, BackendTimeout, ContractViolation, hookimpl
from hicache_storage.calling import Caller


class Right:
    """Answers everything with a miss."""

    @hookimpl
    def batch_set(self, keys: list[str]) -> list[bool]:
        return [False] * len(keys)

    @hookimpl
    def batch_get(self, keys: list[str]) -> list[bool]:
        return [False] * len(keys)

    @hookimpl
    def exists(self) -> int:
        return 0


class Unmarked(Right):
    def exists(self) -> int:
        return 0


class Misspelt(Right):
    @hookimpl
    def batch_gett(self, keys: list[str]) -> list[bool]:
        return []


class UnknownArgument(Right):
    @hookimpl
    def exists(self, keys: list[str], timeout_s: float) -> int:
        return 0


class Defaulted(Right):
    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None = None) -> int:
        return 0


class WithProperties(Right):
    @property
    def connection(self) -> Any:
        raise BackendError("the store is not open", backend="mine", operation="use")

    @functools.cached_property
    def table(self) -> Any:
        raise AssertionError("it was read")

    @staticmethod
    @hookimpl
    def exists() -> int:
        return 0

    @classmethod
    @hookimpl
    def batch_set(cls, keys: list[str]) -> list[bool]:
        return [False] * len(keys)


class Incomplete:
    @hookimpl
    def exists(self, keys: list[str]) -> int:
        return 0


def test_arguments_that_a_backend_leaves_out_are_not_passed() -> None:
    caller = Caller(Right(), name="right")
    assert caller.batch_set(["k"], [()], None) == [False]
    assert caller.exists(["k"], ["p"]) == 0
    assert caller.capabilities == frozenset()


def _of_pluggy_1_6(manager: Any, plugin: object, name: str) -> Any:
    """Reads every attribute; pluggy 1.7 looks at methods alone."""
    method = getattr(plugin, name)
    return getattr(method, manager.project_name + "_impl", None)


@pytest.mark.parametrize("old", [False, True])
def test_properties_are_not_read_at_registration(
    monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """One may say that the backend isn't open yet, or connect."""
    if old:
        monkeypatch.setattr(pluggy.PluginManager, "parse_hookimpl_opts", _of_pluggy_1_6)
        with pytest.raises(BackendError, match="not open"):
            pluggy.PluginManager("hicache_storage").register(WithProperties())
    caller = Caller(WithProperties(), name="mine")
    assert caller.batch_set(["k"], [()], None) == [False]
    assert caller.batch_get(["k"], [()], None) == [False]
    assert caller.exists(["k"], None) == 0


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (Unmarked(), r"Unmarked.exists lacks @hookimpl"),
        (Misspelt(), r"batch_gett.*The hooks are: batch_set\(keys, pages, prefix_keys\)"),
        (UnknownArgument(), r"timeout_s.*exists\(keys, prefix_keys\)"),
        (Defaulted(), r"gives \('prefix_keys',\) a default"),
        (Incomplete(), r"no hookimpl of batch_set; expected: batch_set\(keys, pages"),
        (Right, r"is the class Right; register an instance"),
        (object(), r"no hookimpl of batch_set"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_mistake_is_refused_at_registration_with_the_spec(backend: Any, words: str) -> None:
    with pytest.raises(ContractViolation, match=f"(?s){words}"):
        Caller(backend, name="mine")


def test_a_failed_registration_leaves_no_trace() -> None:
    with pytest.raises(ContractViolation):
        Caller(Misspelt(), name="mine")
    assert Caller(Right(), name="mine").batch_get(["k"], [()], None) == [False]


def test_a_second_backend_in_one_store_is_refused() -> None:
    with pytest.raises(ContractViolation, match="batch_set has 2 implementations"):
        Caller(Right(), name="mine", wrappers=[Right()])


def answering(hook: str, answer: Any) -> object:
    """A backend whose `hook` returns `answer`, or raises it."""

    def implementation(self: object) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    implementation.__name__ = hook
    return type("Answering", (Right,), {hook: hookimpl(implementation)})()


@pytest.mark.parametrize("hook", ["batch_set", "batch_get"])
@pytest.mark.parametrize(
    "answer", [None, True, (True, False), [True], [True] * 3, [True, None], [True, 1], [b"x", True]]
)
def test_a_short_long_or_foreign_list_is_a_violation(hook: str, answer: Any) -> None:
    caller = Caller(answering(hook, answer), name="odd")
    with pytest.raises(ContractViolation, match=f"'odd': {hook} must return a list of 2 bools"):
        getattr(caller, hook)(["a", "b"], [(), ()], None)


@pytest.mark.parametrize("answer", [None, True, -1, 3, 1.0, [1]])
def test_a_count_out_of_range_is_a_violation(answer: Any) -> None:
    caller = Caller(answering("exists", answer), name="odd")
    with pytest.raises(ContractViolation, match="exists must return a count from 0 to 2"):
        caller.exists(["a", "b"], None)


@pytest.mark.parametrize("answer", [[], 0])
def test_an_answer_that_is_false_is_an_answer(answer: Any) -> None:
    hook = "exists" if answer == 0 else "batch_get"
    caller = Caller(answering(hook, answer), name="empty")
    assert getattr(caller, hook)([], *([[]] if hook != "exists" else []), None) == answer


def test_a_foreign_exception_carries_the_backend_and_the_operation() -> None:
    caller = Caller(answering("batch_get", OSError(5, "I/O error")), name="disk")
    with pytest.raises(BackendError, match="'disk', batch_get: OSError") as caught:
        caller.batch_get(["a"], [()], None)
    assert (caught.value.backend, caught.value.operation) == ("disk", "batch_get")
    assert not caught.value.retryable
    assert isinstance(caught.value.__cause__, OSError)


def test_an_error_of_this_package_passes_unchanged() -> None:
    raised = BackendTimeout("slow", backend="disk", operation="exists")
    caller = Caller(answering("exists", raised), name="disk")
    with pytest.raises(BackendTimeout) as caught:
        caller.exists(["a"], None)
    assert caught.value is raised
    assert raised.retryable


def test_an_interrupt_is_not_swallowed() -> None:
    caller = Caller(answering("exists", KeyboardInterrupt()), name="disk")
    with pytest.raises(KeyboardInterrupt):
        caller.exists(["a"], None)


def test_an_optional_hook_that_is_missing_is_named() -> None:
    caller = Caller(Right(), name="small")
    for call in (
        lambda: caller.delete(["a"]),
        caller.usage,
        caller.clear,
        lambda: [*caller.scan("")],
    ):
        with pytest.raises(BackendError, match="this backend has no"):
            call()


def test_wrappers_run_last_registered_outermost() -> None:
    order: list[str] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl(wrapper=True)
        def exists(self, keys: list[str]) -> Any:
            order.append(self.name)
            return (yield)

    Caller(Right(), name="b", wrappers=[Noting("inner"), Noting("outer")]).exists(["a"], None)
    assert order == ["outer", "inner"]


class SpreadWithout(Right):
    def spread(self, hook: str, count: int, work: object) -> None: ...


class SpreadWanting(Right):
    def spread(
        self, hook: str, page_bytes: int, count: int, work: object, pool: object
    ) -> None: ...


class SpreadNumber(Right):
    spread = 4


class SpreadNone(Right):
    spread = None


class SpreadAny(Right):
    def spread(self, **given: object) -> None: ...


@pytest.mark.parametrize("backend", [SpreadWithout, SpreadWanting, SpreadNumber])
def test_a_spread_that_can_not_be_called_is_found_when_the_backend_registers(
    backend: type[Right],
) -> None:
    words = rf"'odd': {backend.__name__}.spread .*spread\(hook, page_bytes, count, work\)"
    with pytest.raises(ContractViolation, match=words):
        Caller(backend(), name="odd")


@pytest.mark.parametrize("backend", [SpreadNone, SpreadAny])
def test_a_spread_may_be_absent_or_take_whatever_it_is_given(backend: type[Right]) -> None:
    Caller(backend(), name="fine")
