"""The benchmark of one GPU's link: its addresses, its report, and a whole run without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pools.simulated_lane import copy_rows  # noqa: E402

from hicache_storage.pools import copy_engine  # noqa: E402
from hicache_storage.pools.memory import HostMemory  # noqa: E402
from hicache_storage.pools.movers import TorchMover  # noqa: E402
from hicache_storage.pools.row_copies import RowCopies  # noqa: E402

ROOT = Path(__file__).parents[2]
MODULES = ("gpu_pools", "gpu_beside", "gpu_peer", "gpu_transfer", "gpu_link_moves", "gpu_link")
KIB, MIB = 1 << 10, 1 << 20


class Stream:
    cuda_stream = 0

    def __init__(self, priority: int = 0) -> None:
        del priority

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        del enable_timing

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


asked: list[tuple[int, int]] = []
"""Copies and rows a copy of each call."""


def copy(copies: Sequence[RowCopies], stream: int, *, to_device: bool, batched: bool) -> None:
    """Moves now, by the addresses alone."""
    asked.extend((len(piece.source), piece.height) for piece in copies)
    copy_rows(copies)


def call(
    self: Any,
    name: str,
    source: Any,
    target: Any,
    count: int,
    stretch: int,
    *rest: int,
    stream: Any,
) -> None:
    """What a kernel of `gpu_link.cu` does."""
    for here, there in zip(source.tolist(), target.tolist(), strict=True):
        ctypes.memmove(there, here, stretch)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """With the CPU in the place of a device."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    found = {name: importlib.import_module(name) for name in MODULES}
    moves, link, beside = found["gpu_link_moves"], found["gpu_link"], found["gpu_beside"]

    class Products(beside.Products):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self.left = self.right = torch.ones(4, 4)
            self.product = torch.empty_like(self.left)
            self.stream = Stream()

    monkeypatch.setattr(moves, "DEVICE", "cpu")
    monkeypatch.setattr(moves, "HostMemory", lambda size, pin: HostMemory(size, pin=False))
    monkeypatch.setattr(moves, "KernelMover", TorchMover)
    monkeypatch.setattr(moves.Compiled, "call", call)
    monkeypatch.setattr(link, "Products", Products)
    monkeypatch.setattr(copy_engine, "copy", copy)
    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "_sleep": lambda ticks: None,
        "is_available": lambda: True,
        "get_device_capability": lambda: (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(found["gpu_transfer"].subprocess, "run", lambda *a, **b: Said())
    monkeypatch.setattr(found["gpu_pools"].gc, "collect", lambda: 0)
    asked.clear()
    yield found
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name)


class Said:
    stdout = "a card, 1.0"


class Compiler:
    """An nvcc with a given exit code."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    def communicate(self) -> tuple[str, None]:
        return "no such thing", None


def test_pieces_and_rows_go_out_and_come_back_whole(modules: dict[str, ModuleType]) -> None:
    moves = modules["gpu_link_moves"]
    ends = moves.Ends(4 * MIB)
    pieces = moves.Pages.stretches(ends, 8 * KIB, 1 * MIB)
    rows = moves.Pages.rows(ends, 2 * KIB, 8 * KIB)
    assert rows.device.shape == (8, 64, 2 * KIB)
    assert rows.host.shape == (16, 64, 2 * KIB)
    for move in (pieces.batches(1, 64), pieces.batches(2, 256), rows.batches(1, 64)):
        assert move.size_bytes == 1 * MIB
        assert move.equal() == "equal"
    assert pieces.kernel()(2).equal() == "equal"
    host = pieces.in_host.tolist()
    assert host == sorted(set(host))
    assert host[-1] >= len(pieces.device)


def test_a_call_has_no_more_copies_than_it_says_and_leaves_the_package_as_it_was(
    modules: dict[str, ModuleType],
) -> None:
    moves = modules["gpu_link_moves"]
    pages = moves.Pages.stretches(moves.Ends(4 * MIB), 4 * KIB, 4 * MIB)
    usual = copy_engine.BATCH
    for streams, a_call in ((1, 64), (2, 256)):
        asked.clear()
        pages.batches(streams, a_call).ask("load")
        assert max(count for count, _ in asked) == a_call
        assert usual == copy_engine.BATCH


@pytest.mark.parametrize("lost", ["backup", "load"])
def test_a_way_that_loses_bytes_is_found_out(modules: dict[str, ModuleType], lost: str) -> None:
    moves = modules["gpu_link_moves"]
    move = moves.Pages.stretches(moves.Ends(1 * MIB), 8 * KIB, 1 * MIB).batches(1, 64)
    whole = move.ask
    assert move.equal() == "equal"
    move.ask = lambda verb: None if verb == lost else whole(verb)
    assert move.equal() == "DIFFER"


def test_both_ways_at_once_are_compared_each_way(modules: dict[str, ModuleType]) -> None:
    moves, link = modules["gpu_link_moves"], modules["gpu_link"]
    ends = moves.Ends(1 * MIB)
    out = moves.plain(ends.device, ends.host[:MIB], ends.streams[0])
    back = moves.plain(torch.empty_like(ends.device), ends.host[MIB:], ends.streams[1])
    assert link._both_equal(out, back) == "equal"
    for move, verb in ((out, "backup"), (back, "load")):
        whole = move.ask
        move.ask = lambda asked, verb=verb, whole=whole: None if asked == verb else whole(asked)
        assert link._both_equal(out, back) == "DIFFER"
        move.ask = whole


def test_rates_are_medians_of_the_whole_or_of_what_events_saw(
    modules: dict[str, ModuleType],
) -> None:
    times = modules["gpu_pools"].Times(
        {"backup": [1.0, 2.0, 9.0], "load": [4.0]}, {"backup": [0.5], "load": [0.001]}
    )
    rates = modules["gpu_link"].rates
    assert rates(times, 8 * 10**9, by_events=False) == {
        "out_GBps": 4.0, "out_call_ms": 500.0, "back_GBps": 2.0, "back_call_ms": 1.0
    }  # fmt: skip
    assert rates(times, 8 * 10**9, by_events=True) == {"out_GBps": 16.0, "back_GBps": 8000.0}


def run(link: ModuleType, monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str) -> Any:
    monkeypatch.setattr(
        sys, "argv",
        ["gpu_link.py", "--results", str(directory), "--mib", "16", "--rounds", "1", *arguments],
    )  # fmt: skip
    link.main()
    return json.loads((directory / "gpu_link.json").read_text())["results"]


def test_a_run_has_a_row_of_equal_bytes_for_each_configuration(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moves, link = modules["gpu_link_moves"], modules["gpu_link"]
    monkeypatch.setattr(moves.shutil, "which", lambda name: "nvcc")
    monkeypatch.setattr(moves.subprocess, "Popen", lambda *a, **b: Compiler(0))
    monkeypatch.setattr(link, "MOST_PIECES", 64)
    monkeypatch.setattr(link, "MOST_STRETCHES", 64)
    found = run(link, monkeypatch, tmp_path)
    assert {part: len(rows) for part, rows in found.items()} == {
        "plain": 2, "pieces": 16, "rows": 7, "kernel": 20, "bulk": 12, "beside": 11
    }  # fmt: skip
    rows = [row for part in link.PARTS if part != "beside" for row in found[part]]
    assert {row["bytes"] for row in rows} == {"equal"}
    # Rounded, and of a few bytes, which a busy machine may take long for.
    assert all(row["out_GBps"] >= 0 and row["back_GBps"] >= 0 for row in rows)
    text = (tmp_path / "gpu_link.md").read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [
        *(title for _, title, _ in link.PARTS.values()),
        "Other ways tried",
    ]
    assert "- command: python gpu_link.py" in text


@pytest.mark.parametrize(
    ("capability", "nvcc", "reason"),
    [((8, 9), "nvcc", "(8, 9) is below"), ((9, 0), None, "no nvcc"), ((9, 0), "nvcc", "gave 2")],
)
def test_bulk_copies_that_cant_be_are_skipped_with_the_reason(
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int],
    nvcc: str | None,
    reason: str,
) -> None:
    moves, link = modules["gpu_link_moves"], modules["gpu_link"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(moves.shutil, "which", lambda name: nvcc)
    monkeypatch.setattr(moves.subprocess, "Popen", lambda *a, **b: Compiler(2))
    (row,) = run(link, monkeypatch, tmp_path, "--parts", "bulk")["bulk"]
    assert reason in row["skipped"]


def test_a_part_that_fails_doesnt_keep_the_others_from_being_written(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = modules["gpu_link"]

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA refused a copy")

    monkeypatch.setattr(copy_engine, "copy", refuse)
    with pytest.raises(SystemExit, match=r"pieces: .*CUDA refused a copy"):
        run(link, monkeypatch, tmp_path, "--parts", "pieces,plain")
    found = json.loads((tmp_path / "gpu_link.json").read_text())["results"]
    assert [row["bytes"] for row in found["plain"]] == ["equal", "equal"]
    assert "CUDA refused a copy" in (tmp_path / "gpu_link.md").read_text()
