"""Stand-ins that let SGLang's storage code be imported where its GPU packages are missing.

Some packages that SGLang imports at the top of its modules exist only with a GPU, or weigh a
gigabyte. None of them takes part in reading or writing pages. `install()` answers imports of
those that are not installed with empty modules whose names can be called, used as decorators
and subclassed; packages that are installed are used as they are.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = (
    "IPython",
    "compressed_tensors",
    "datasets",
    "gguf",
    "sentencepiece",
    "sgl_kernel",
    "torchvision",
    "triton",
    "xgrammar",
)


class _EmptyModule(ModuleType):
    """A module that has every name: classes for capitalised ones, submodules for the rest."""

    __version__ = "0"
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any
        if name[0].isupper():
            found = _empty_class(name, self.__name__)
        else:
            found = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator it gives back what it decorates, with or without arguments."""
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda decorated: decorated


class _EmptyMeta(type):
    """Classes whose every attribute is its own name, as members of enumerations would be."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _empty_class(name: str, module: str) -> type:
    def schema(cls: type, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def take_anything(self: object, *args: Any, **kwargs: Any) -> None:
        """Some are made when modules are imported, such as configurations of kernels."""

    body = {
        "__module__": module,
        "__init__": take_anything,
        "__get_pydantic_core_schema__": classmethod(schema),
    }
    return _EmptyMeta(name, (), body)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install(packages: Sequence[str] = PACKAGES) -> list[str]:
    """Stands in for those of `packages` that aren't installed; their names."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.meta_path.append(_Finder(missing))
    return missing
