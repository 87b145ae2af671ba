"""Functions of the CUDA driver that torch doesn't offer."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

_VOID, _ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
_BATCH_ARGUMENTS = (_VOID, _VOID, _VOID, _SIZE, _VOID, _VOID, _SIZE)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _VOID),
    "cuMemcpy2DAsync_v2": (_VOID, _VOID),
    "cuMemcpyBatchAsync": (*_BATCH_ARGUMENTS, _VOID, _VOID),
    "cuMemcpyBatchAsync_v2": (*_BATCH_ARGUMENTS, _VOID),
    "cuMemcpy3DBatchAsync": (_SIZE, _VOID, _VOID, ctypes.c_ulonglong, _VOID),
    "cuMemcpy3DBatchAsync_v2": (_SIZE, _VOID, ctypes.c_ulonglong, _VOID),
    "cuStreamWaitValue32_v2": (_VOID, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
}
"""With these, calls take plain numbers, in half the time."""


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The driver. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def has(name: str) -> bool:
    """Whether the driver has this function, in its first version or its second."""
    return hasattr(library(), name) or hasattr(library(), f"{name}_v2")


@functools.cache
def versioned(name: str) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """A batch call, and the argument that only its first version has: where it failed."""
    if hasattr(library(), f"{name}_v2"):
        return call(f"{name}_v2"), ()
    return call(name), (ctypes.byref(ctypes.c_size_t(0)),)


@functools.lru_cache(maxsize=8)
def call(name: str) -> Callable[..., None]:
    """A function of this very name, one of `_ARGUMENTS`, which raises RuntimeError if CUDA
    refuses."""
    function = getattr(library(), name)
    function.argtypes = _ARGUMENTS[name]

    def checked(*arguments: Any) -> None:
        status = function(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            library().cuGetErrorString(status, ctypes.byref(text))
            found = text.value.decode() if text.value else "unknown"
            raise RuntimeError(f"CUDA refused {name}: {status} ({found})")

    return checked
