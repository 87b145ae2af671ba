"""NUMA: host memory near the device that copies to it. From another node, bytes cross the link
between the processors too."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

_log = logging.getLogger(__name__)
_NODES = Path("/sys/devices/system/node/online")
_PCI = Path("/sys/bus/pci/devices")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call, which glibc has no function for."""
_PREFERRED = 1
_MOST_NODES = 1024


def place(address: int, size_bytes: int, device: int) -> int | None:
    """Has the memory pages in this range, none of which may be in use yet, lie on the node of
    the CUDA device as long as there is room; returns the node. None if there is one node only,
    if nothing says which is the device's, or if the kernel refuses, which is no error."""
    if len(nodes()) < 2:
        return None
    node = node_of(device)
    if node is None:
        _log.info("no NUMA node is known for CUDA device %d: host memory lies anywhere", device)
        return None
    if not prefer(address, size_bytes, node):
        _log.info("the kernel refuses to place host memory on NUMA node %d", node)
        return None
    return node


def nodes() -> list[int]:
    """The nodes of this machine; none if it doesn't say."""
    try:
        ranges = _NODES.read_text().strip().split(",")
        bounds = [[int(bound) for bound in each.split("-")] for each in ranges]
    except (OSError, ValueError):
        return []
    return [node for each in bounds for node in range(each[0], each[-1] + 1)]


def node_of(device: int) -> int | None:
    """The node that a CUDA device is attached to."""
    try:
        text = (_PCI / _pci_address(device) / "numa_node").read_text()
        node = int(text)
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(address: int, size_bytes: int, node: int) -> bool:
    """Whether the kernel takes the wish that these memory pages lie on that node."""
    number = _MBIND.get(platform.machine())
    if number is None or node >= _MOST_NODES:
        return False
    mask = (ctypes.c_ulong * (_MOST_NODES // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    page = os.sysconf("SC_PAGE_SIZE")
    start = address // page * page
    status = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(start),
        ctypes.c_ulong(address + size_bytes - start),
        ctypes.c_int(_PREFERRED),
        mask,
        ctypes.c_ulong(_MOST_NODES + 1),
        ctypes.c_uint(0),
    )
    return bool(status == 0)


def _pci_address(device: int) -> str:
    """As `/sys` writes it: 0000:3b:00.0."""
    text = ctypes.create_string_buffer(32)
    driver = ctypes.CDLL("libcuda.so.1")
    if driver.cuDeviceGetPCIBusId(text, ctypes.c_int(len(text)), ctypes.c_int(device)) != 0:
        raise OSError("the CUDA driver doesn't say where the device is")
    return text.value.decode().lower()
