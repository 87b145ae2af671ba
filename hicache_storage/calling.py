"""Caller: one backend behind one pluggy manager, checked when it registers and at every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any, get_args

import pluggy

from . import hookspecs
from .errors import BackendError, ContractViolation, HiCacheStorageError
from .hookspecs import OPTIONAL_HOOKS, PROJECT, REQUIRED_HOOKS, Scope, StoredPage, Usage
from .page import PageSpans
from .parts import Parts

_METHODS = FunctionType, MethodType, classmethod, staticmethod


class _Plugins(pluggy.PluginManager):
    """Looks for hookimpls among methods alone. pluggy 1.6 reads every attribute of a plugin, and a
    property may connect, or say that the backend isn't open."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if not isinstance(inspect.getattr_static(plugin, name, None), _METHODS):
            return None
        return super().parse_hookimpl_opts(plugin, name)


class Caller:
    """Calls one backend through its hooks.

    `wrappers` are plugins whose hookimpls are all `wrapper=True`; the last one is outermost.
    Raises ContractViolation if the backend or a wrapper breaks the contract of `hookspecs`.
    Every call gives a checked result or raises an error of this package.
    """

    def __init__(self, backend: object, *, name: str, wrappers: Sequence[object] = ()) -> None:
        self.name = name
        self.backend = backend
        self.scope: Scope = _scope(backend, name)
        self._plugins = _Plugins(PROJECT)
        self._plugins.add_hookspecs(hookspecs)
        _check_shape(backend, name)
        _check_spread(backend, name)
        self._register(backend, name)
        for number, wrapper in enumerate(wrappers):
            self._register(wrapper, f"{type(wrapper).__name__}-{number}")
        self.capabilities = frozenset(
            hook for hook in OPTIONAL_HOOKS if self._implementations(hook) == 1
        )
        for hook in REQUIRED_HOOKS + OPTIONAL_HOOKS:
            found = self._implementations(hook)
            if found > 1:
                raise ContractViolation(
                    f"{hook} has {found} implementations; a store has one backend, and "
                    "everything else around it is a wrapper (hookimpl(wrapper=True))"
                )
            if found == 0 and hook in REQUIRED_HOOKS:
                raise ContractViolation(
                    f"backend {name!r} ({type(backend).__name__}) has no hookimpl of {hook}; "
                    f"expected: {_signature(hook)}"
                )

    def _register(self, plugin: object, name: str) -> None:
        try:
            self._plugins.register(plugin, name)
            self._plugins.check_pending()
        except pluggy.PluginValidationError as error:
            shown = "; ".join(_signature(hook) for hook in REQUIRED_HOOKS + OPTIONAL_HOOKS)
            raise ContractViolation(f"plugin {name!r}: {error}. The hooks are: {shown}") from error
        for hook in self._plugins.get_hookcallers(plugin) or ():
            for implementation in hook.get_hookimpls():
                if implementation.plugin is plugin and implementation.kwargnames:
                    raise ContractViolation(
                        f"plugin {name!r}: {hook.name} gives {implementation.kwargnames} a "
                        "default; pluggy would never pass them. Leave the default or the "
                        "argument out"
                    )

    def _implementations(self, hook: str) -> int:
        caller = getattr(self._plugins.hook, hook)
        return sum(not (i.wrapper or i.hookwrapper) for i in caller.get_hookimpls())

    def _call(self, hook: str, **arguments: Any) -> Any:
        return self._translated(hook, getattr(self._plugins.hook, hook), arguments)

    def _translated(self, hook: str, call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        try:
            return call(**arguments)
        except HiCacheStorageError:
            raise
        except Exception as error:
            raise BackendError(
                f"{type(error).__name__}: {error}", backend=self.name, operation=hook
            ) from error

    def _bools(self, hook: str, keys: list[str], result: Any) -> list[bool]:
        if (
            type(result) is not list
            or len(result) != len(keys)
            or not all(type(answer) is bool for answer in result)
        ):
            raise ContractViolation(
                f"backend {self.name!r}: {hook} must return a list of {len(keys)} bools, "
                f"got {result!r:.200}"
            )
        return result

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        """Calls `work` with the parts of a batch of `count` pages as the backend wants them, on
        its threads if it lends some. No thread is at a part any more when it returns or raises;
        what a part raised, it raises as it is."""
        spread = getattr(self.backend, "spread", None)
        if spread is None:
            work(slice(0, count))
            return
        with Parts(count, work, f"backend {self.name!r}: spread") as parts:
            arguments = {"hook": hook, "page_bytes": page_bytes, "count": count, "work": parts}
            self._translated(hook, spread, arguments)

    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        result = self._call("batch_set", keys=keys, pages=pages, prefix_keys=prefix_keys)
        return self._bools("batch_set", keys, result)

    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        result = self._call("batch_get", keys=keys, buffers=buffers, prefix_keys=prefix_keys)
        return self._bools("batch_get", keys, result)

    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        result = self._call("exists", keys=keys, prefix_keys=prefix_keys)
        if type(result) is not int or not 0 <= result <= len(keys):
            raise ContractViolation(
                f"backend {self.name!r}: exists must return a count from 0 to {len(keys)}, "
                f"got {result!r:.200}"
            )
        return result

    def delete(self, keys: list[str]) -> list[bool]:
        self._require("delete")
        return self._bools("delete", keys, self._call("delete", keys=keys))

    def scan(self, prefix: str) -> Iterator[StoredPage]:
        self._require("scan")
        yield from self._call("scan", prefix=prefix)

    def usage(self) -> Usage:
        self._require("usage")
        result = self._call("usage")
        if not isinstance(result, Usage):
            raise ContractViolation(
                f"backend {self.name!r}: usage must return a Usage, got {result!r:.200}"
            )
        return result

    def clear(self) -> None:
        self._require("clear")
        self._call("clear")

    def open(self) -> None:
        self._call("open")

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._call("close")

    def _require(self, hook: str) -> None:
        if hook not in self.capabilities:
            raise BackendError(
                f"this backend has no {hook}; it can {sorted(self.capabilities)}",
                backend=self.name,
                operation=hook,
            )


def _signature(hook: str) -> str:
    spec: Callable[..., Any] = getattr(hookspecs, hook)
    return f"{hook}({', '.join(inspect.signature(spec).parameters)})"


def _scope(backend: object, name: str) -> Scope:
    scope: Scope = getattr(backend, "scope", "shared")
    if scope not in get_args(Scope):
        raise ContractViolation(
            f"backend {name!r}: scope must be one of {', '.join(get_args(Scope))}, got {scope!r}"
        )
    return scope


def _check_shape(backend: object, name: str) -> None:
    """Finds the mistakes that pluggy passes over in silence."""
    if inspect.isclass(backend):
        raise ContractViolation(
            f"backend {name!r} is the class {backend.__name__}; register an instance of it"
        )
    for hook in REQUIRED_HOOKS + OPTIONAL_HOOKS:
        method = inspect.getattr_static(type(backend), hook, None)
        method = getattr(method, "__func__", method)  # of a static or a class method
        if callable(method) and not hasattr(method, f"{PROJECT}_impl"):
            raise ContractViolation(
                f"backend {name!r}: {type(backend).__name__}.{hook} lacks @hookimpl; pluggy "
                "would never call it"
            )


def _check_spread(backend: object, name: str) -> None:
    spread = getattr(backend, "spread", None)
    if spread is None:
        return
    try:
        inspect.signature(spread).bind(hook="", page_bytes=1, count=1, work=lambda part: None)
    except ValueError:  # no signature to be had, as of some that are written in C
        return
    except TypeError as error:
        raise ContractViolation(
            f"backend {name!r}: {type(backend).__name__}.spread can't be called: {error}; "
            "expected: spread(hook, page_bytes, count, work)"
        ) from error
