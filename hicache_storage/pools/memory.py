"""Host memory: page-aligned, optionally pinned, and not more of it than there is."""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError
from . import numa

_log = logging.getLogger(__name__)
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_HUGE_PAGES_FROM = 64 << 20


class HostMemory:
    """`size_bytes` of zeroed memory of this process, aligned to its memory pages.

    `view` and `tensor` are the same bytes; each keeps them mapped. A pinned one is registered
    with CUDA until this object goes.
    """

    def __init__(self, size_bytes: int, *, pin: bool) -> None:
        # Private, so that a forked child gets a copy of its own. The pinned allocator of torch
        # would round the size up to a power of two.
        try:
            mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"no {size_bytes} bytes of host memory ({error}); lower host_pages"
            ) from error
        if size_bytes >= _HUGE_PAGES_FROM:
            # Less to map and to pin: half the time for a pool of some GiB.
            with contextlib.suppress(OSError, AttributeError):
                mapped.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(mapped)
        self.tensor: Tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        self.pinned = pin
        self.node: int | None = None
        """The NUMA node that pinned memory was placed on, the current CUDA device's, where there
        are several."""
        if pin:
            if torch.cuda.is_available():
                device = torch.cuda.current_device()
                self.node = numa.place(self.tensor.data_ptr(), size_bytes, device)
            _register(self.tensor)
            weakref.finalize(self, _unregister, self.tensor).atexit = False


def _register(tensor: Tensor) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("pin=True needs a CUDA device, and torch finds none; give pin=False")
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(status) != 0:
        raise ConfigError(
            f"CUDA can't pin {tensor.numel()} bytes of host memory (status {int(status)}); lower "
            "host_pages, raise the memlock limit, or give pin=False"
        )


def _unregister(tensor: Tensor) -> None:
    # The memory goes back to the kernel next: no copy may be under way.
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def available_bytes() -> int | None:
    """Memory that can still be had without swapping: the kernel's MemAvailable, or less if this
    process's control group allows less. None where neither can be read."""
    found = [left for left in (_meminfo_available(), _cgroup_left()) if left is not None]
    return min(found, default=None)


def require_host_memory(needed_bytes: int, available: int | None, what: str) -> None:
    """Raises ConfigError if `what` needs more than `available` bytes."""
    if available is not None and needed_bytes > available:
        raise ConfigError(
            f"{what} needs {needed_bytes / 2**30:.2f} GiB of host memory and "
            f"{available / 2**30:.2f} GiB are available; lower host_pages"
        )


def _meminfo_available() -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError) as error:
        _log.debug("no MemAvailable: %s", error)
    return None


def _cgroup_left() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        counts = dict(
            line.split(maxsplit=1) for line in (_CGROUP / "memory.stat").read_text().splitlines()
        )
        # The kernel drops cached file pages before it refuses memory.
        cached = sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))
        return max(0, int(limit) - used + cached)
    except (OSError, ValueError):
        return None
