"""Host memory lies near the device, where there is a choice."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from hicache_storage.pools import numa


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes, and a CUDA device 0 on node 1."""
    monkeypatch.setattr(numa, "_NODES", tmp_path / "online")
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    monkeypatch.setattr(numa, "_pci_address", lambda device: f"0000:3b:00.{device}")
    (tmp_path / "online").write_text("0-1\n")
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"), [("0\n", [0]), ("0-1,4\n", [0, 1, 4]), ("", []), ("?", [])]
)
def test_nodes_are_read_from_the_kernels_ranges(
    machine: Path, text: str, expected: list[int]
) -> None:
    (machine / "online").write_text(text)
    assert numa.nodes() == expected


def test_memory_is_placed_on_the_devices_node(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(numa, "prefer", lambda *given: not asked.append(given))
    assert numa.place(4096, 8192, 0) == 1
    assert asked == [(4096, 8192, 1)]


@pytest.mark.parametrize("why", ["one node", "no node known", "device unknown", "refused"])
def test_memory_lies_anywhere_where_nothing_can_be_chosen(
    machine: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(numa, "prefer", lambda *given: why != "refused")
    if why == "one node":
        (machine / "online").write_text("0\n")
    elif why == "no node known":
        (machine / "0000:3b:00.0" / "numa_node").write_text("-1\n")
    assert numa.place(4096, 8192, 1 if why == "device unknown" else 0) is None


def test_the_kernel_takes_the_wish_and_the_memory_is_usable() -> None:
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if numa.nodes() and numa.prefer(address, len(memory), numa.nodes()[0]):
        maps = Path("/proc/self/numa_maps").read_text()
        line = next(line for line in maps.splitlines() if line.startswith(f"{address:x}"))
        assert f"prefer:{numa.nodes()[0]}" in line, line
    memory[:] = b"\x05" * len(memory)
    assert memory[-1] == 5


def test_a_node_that_is_none_is_refused() -> None:
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert not numa.prefer(address, len(memory), 1000)
    assert not numa.prefer(address, len(memory), 100_000)
