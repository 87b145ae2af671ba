"""Copies between byte views, other threads running meanwhile where it pays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

UNLOCKED_BYTES = 256 << 10
"""From this length on, a copy lets other threads run. Assigning to a slice keeps the interpreter
lock; below this the call that frees it costs more than the copy takes, beside a busy thread much
more."""


class _Buffer(ctypes.Structure):
    """Python's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_acquire = ctypes.pythonapi.PyObject_GetBuffer
_acquire.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [ctypes.POINTER(_Buffer)]
_release.restype = None
_WRITABLE = 1


def address(view: Any) -> int:
    """Where the memory of a buffer begins. It tells nothing of how long that memory lasts."""
    found = _Buffer()
    _acquire(view, ctypes.byref(found), 0)
    place: int = found.buf
    _release(ctypes.byref(found))
    return place


def copy(target: memoryview, source: memoryview) -> None:
    """Copies `source` to the beginning of `target`, which isn't shorter; both flat bytes."""
    length = len(source)
    if length < UNLOCKED_BYTES:
        target[:length] = source
        return
    into, out_of = _Buffer(), _Buffer()
    _acquire(target, ctypes.byref(into), _WRITABLE)
    try:
        _acquire(source, ctypes.byref(out_of), 0)
        try:
            ctypes.memmove(into.buf, out_of.buf, length)
        finally:
            _release(ctypes.byref(out_of))
    finally:
        _release(ctypes.byref(into))


def gather(target: memoryview, sources: Iterable[memoryview]) -> None:
    """Copies the sources one after the other to the beginning of `target`."""
    place = 0
    for source in sources:
        end = place + len(source)
        if end - place < UNLOCKED_BYTES:
            target[place:end] = source
        else:
            copy(target[place:end], source)
        place = end


def scatter(targets: Iterable[memoryview], sources: Iterable[memoryview]) -> None:
    """Copies the sources, as one string of bytes, over the targets in order; equal in length."""
    more = iter(sources)
    source, start, end = memoryview(b""), 0, 0
    for target in targets:
        length = len(target)
        if length <= end - start:
            if length < UNLOCKED_BYTES:
                target[:] = source[start : start + length]
            else:
                copy(target, source[start : start + length])
            start += length
            continue
        place = 0
        while place < length:
            if start == end:
                source = next(more)
                start, end = 0, len(source)
                continue
            part = min(end - start, length - place)
            copy(target[place : place + part], source[start : start + part])
            place += part
            start += part
