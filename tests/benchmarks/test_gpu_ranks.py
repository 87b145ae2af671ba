"""The benchmark of several ranks: its arithmetic, its start, and a whole run without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu_ranks.py"
MODULES = ("rank_rates", "rank_meeting", "gpu_pools", "rank_pools", "gpu_ranks")
GB = 10**9


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def rates(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["rank_rates"]


@pytest.fixture
def meetings(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(modules["rank_meeting"], "PATIENCE_S", 60.0)
    return modules["rank_meeting"]


def run(program: Path, results: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(program), "--device", "cpu", "--quick", "--rounds", "2",
         "--tokens", "128", "--results", str(results), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_what_ranks_move_together_counts_from_the_first_start_to_the_last_arrival(
    rates: ModuleType,
) -> None:
    early = [rates.Copy("backup", 10.0, 10.1, 12.0, 4 * GB)]
    late = [rates.Copy("backup", 11.0, 11.1, 14.0, 8 * GB)]
    assert rates.rate(early) == pytest.approx(2.0)
    assert rates.rate([*early, *late]) == pytest.approx(3.0)
    assert rates.overlap_percent([early, late]) == pytest.approx(25.0)
    after = [rates.Copy("backup", 12.5, 12.6, 14.0, 8 * GB)]
    assert rates.overlap_percent([early, after]) == 0.0


def test_cases_are_each_rank_alone_and_then_all_each_way_and_both(rates: ModuleType) -> None:
    ways = [("backup",), ("load",), ("backup", "load")]
    assert [(case.ranks, case.verbs) for case in rates.cases(2)] == [
        (ranks, verbs) for ranks in ((0,), (1,), (0, 1)) for verbs in ways
    ]
    assert [case.ranks for case in rates.cases(1)] == [(0,)] * 3


def rounds(rates: ModuleType, seconds: list[float], size_bytes: int) -> list[list[Any]]:
    """A backup in each round, 50 ms of it in the call."""
    return [[rates.Copy("backup", 100.0, 100.05, 100.0 + took, size_bytes)] for took in seconds]


def test_rates_are_medians_and_stand_beside_the_ceiling_and_beside_each_rank_alone(
    rates: ModuleType,
) -> None:
    zero, one, both = (rates.Case(ranks, ("backup",)) for ranks in ((0,), (1,), (0, 1)))
    # Rank 1 has half of the rank's 0 rate; at once each takes twice as long, its ceiling does not.
    found = [
        {
            (zero, "ours"): rounds(rates, [0.1, 0.2, 9.0], 2 * GB),
            (zero, "ceiling"): rounds(rates, [0.1, 0.1, 0.1], 2 * GB),
            (both, "ours"): rounds(rates, [0.4, 0.4, 0.4], 2 * GB),
            (both, "ceiling"): rounds(rates, [0.1, 0.1, 0.1], 2 * GB),
        },
        {
            (one, "ours"): rounds(rates, [0.4, 0.4, 0.4], 2 * GB),
            (one, "ceiling"): rounds(rates, [0.2, 0.2, 0.2], 2 * GB),
            (both, "ours"): rounds(rates, [0.8, 0.8, 0.8], 2 * GB),
            (both, "ceiling"): rounds(rates, [0.2, 0.2, 0.2], 2 * GB),
        },
    ]
    table = rates.rows(found, [zero, one, both])
    shown = [
        (case.when, row["rank"], row["ours_GBps"], row["ceiling_GBps"], row["percent"],
         row.get("of_alone_percent"))
        for case, row in table
    ]  # fmt: skip
    assert shown == [
        ("alone", 0, 10.0, 20.0, 50.0, None),
        ("alone", 1, 5.0, 10.0, 50.0, None),
        ("at once", 0, 5.0, 20.0, 25.0, 50.0),
        ("at once", 1, 2.5, 10.0, 25.0, 50.0),
        ("at once", "together", 5.0, 20.0, 25.0, 33.3),
    ]
    assert [row.get("call_ms") for _, row in table] == [50.0] * 4 + [None]
    assert [row.get("overlap_percent") for _, row in table] == [None] * 4 + [50.0]


def test_each_way_of_both_has_a_rate_of_its_own(rates: ModuleType) -> None:
    case = rates.Case((0,), ("backup", "load"))
    turn = [rates.Copy("backup", 0.0, 0.1, 1.0, 3 * GB), rates.Copy("load", 1.0, 1.1, 3.0, 3 * GB)]
    ((_, row),) = rates.rows([{(case, "ours"): [turn], (case, "ceiling"): [turn]}], [case])
    assert (row["ours_GBps"], row["ours_backup_GBps"], row["ours_load_GBps"]) == (2.0, 3.0, 1.5)


def test_no_rank_starts_before_all_have_come(meetings: ModuleType) -> None:
    shared = meetings.Meeting(threading.Barrier(3), SimpleNamespace(value=0.0))
    came: list[float] = []
    moments: list[tuple[float, float]] = []

    def rank(wait_s: float) -> None:
        for _ in range(3):
            time.sleep(wait_s)
            came.append(time.perf_counter())
            moment = shared.start()
            moments.append((moment, time.perf_counter()))

    threads = [threading.Thread(target=rank, args=(0.01 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(moments) == 9
    assert len({moment for moment, _ in moments}) == 3
    assert all(started >= moment for moment, started in moments)
    for turn, moment in enumerate(sorted({moment for moment, _ in moments})):
        assert moment > max(sorted(came)[3 * turn : 3 * turn + 3])


FAULTS = """
import os, time

def work(rank, meeting, send, kind):
    send(rank)
    meeting.start()
    if rank == 1 and kind == "raises":
        raise ValueError("the pool is too small")
    if rank == 1 and kind == "dies":
        os._exit(9)
    if kind == "dies later":
        if rank == 1:
            send(10)
            os._exit(9)
        time.sleep(60)
    meeting.start()
    send(10 * rank)
"""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("raises", "rank 1 failed:.*the pool is too small"),
        ("dies", "rank 1 ended with exit code 9"),
        ("dies later", "rank 1 ended with exit code 9"),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(
    meetings: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, says: str
) -> None:
    (tmp_path / "rank_faults.py").write_text(FAULTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    faults = importlib.import_module("rank_faults")
    with meetings.Ranks(2, faults.work, "") as ranks:
        assert ranks.receive() == [0, 1]
        assert ranks.receive() == [0, 10]
        ranks.finish()
    began = time.perf_counter()
    with meetings.Ranks(2, faults.work, kind) as ranks:
        assert ranks.receive() == [0, 1]
        with pytest.raises(meetings.RankFailed, match=f"(?s){says}"):
            ranks.receive()
    assert time.perf_counter() - began < 40
    assert not any(process.is_alive() for process in ranks._processes)
    monkeypatch.delitem(sys.modules, "rank_faults")


def test_a_run_on_two_ranks_has_every_case_and_all_bytes_come_back(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    code, said = run(PROGRAM, tmp_path)
    assert code == 0, said
    written = json.loads((tmp_path / "gpu_ranks.json").read_text())
    pairs = [
        (model, layout)
        for model in modules["rank_pools"].MODELS
        for layout in ("layer_first", "page_first")
    ]
    for part, ranks in (("alone", [0, 1]), ("at once", [0, 1, "together"])):
        rows = written["results"][part]
        seen = {(row["model"], row["layout"], row["moves"], row["rank"]) for row in rows}
        assert len(rows) == len(seen)
        assert seen == {
            (*pair, moves, rank)
            for pair in pairs
            for moves in ("backup", "load", "backup + load")
            for rank in ranks
        }
        assert {row["bytes"] for row in rows} == {"equal"}
        assert all(row["ours_GBps"] > 0 and row["ceiling_GBps"] > 0 for row in rows)
    assert len(written["results"]["places"]) == 2
    assert written["about"]["ranks"] == 2
    page = (tmp_path / "gpu_ranks.md").read_text()
    assert page.count("| together |") == len(pairs) * 3


LOSES = """
import sys
sys.path[:0] = [{root!r}, {benchmarks!r}]
from hicache_storage.pools.paired import PairedPools
import gpu_ranks
{fault}
if __name__ == "__main__":
    gpu_ranks.main()
"""


@pytest.mark.parametrize(
    "fault",
    [
        "from hicache_storage.pools import paired\n"
        "ends = paired.Ends\n"
        "paired.Ends = lambda device, host, draft=None: ends(device, host)",
        "backup = PairedPools.backup\n"
        "PairedPools.backup = lambda self, pages, host: backup(self, pages[1:], host[1:])",
        "load = PairedPools.load_back\n"
        "PairedPools.load_back = lambda self, host, pages: load(self, host.flip(0), pages)",
    ],
    ids=["no draft", "a page is left out", "pages in another order"],
)
def test_a_page_that_does_not_come_back_is_said_and_fails_the_run(
    tmp_path: Path, fault: str
) -> None:
    program = tmp_path / "loses.py"
    benchmarks = str(ROOT / "benchmarks")
    program.write_text(LOSES.format(root=str(ROOT), benchmarks=benchmarks, fault=fault))
    code, said = run(program, tmp_path, "--ranks", "1")
    assert code == 1
    assert "bytes differ" in said
    rows = json.loads((tmp_path / "gpu_ranks.json").read_text())["results"]["alone"]
    assert {row["bytes"] for row in rows} == {"DIFFER"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", "100"], "multiple of 64"),
        (["--ranks", "0"], "--ranks 0"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_what_can_not_be_measured_is_refused(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    code, said = run(PROGRAM, tmp_path, *arguments)
    assert code == 2
    assert says in said


def test_memory_is_on_the_nodes_that_the_kernel_says(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    maps = tmp_path / "numa_maps"
    maps.write_text(
        "7f0000000000 default file=/usr/lib/x mapped=2 N0=2 kernelpagesize_kB=4\n"
        "7f0010000000 prefer:1 anon=1024 dirty=1024 N0=256 N1=768 kernelpagesize_kB=4\n"
        "7f0020000000 default anon=2 N1=2 kernelpagesize_kB=2048\n"
    )
    nodes = modules["rank_pools"].memory_nodes
    assert nodes(0x7F0010000000, maps) == {"0": 1, "1": 3}
    assert nodes(0x7F0010001000, maps) == {"0": 1, "1": 3}
    assert nodes(0x7F0020000000, maps) == {"1": 4}
    assert nodes(0x1000, maps) is None
    assert nodes(0x1000, tmp_path / "none") is None


def test_a_link_is_found_by_its_devices_address(modules: dict[str, ModuleType]) -> None:
    listed = "00000000:3B:00.0, 1, 5, 16, 16\n00000000:DB:00.0, 5, 5, 8, 16"
    found = modules["gpu_ranks"].links(listed)
    assert found == {"0000:3b:00": "gen 1 of 5, x16 of x16", "0000:db:00": "gen 5 of 5, x8 of x16"}
    assert modules["gpu_ranks"].links("nvidia-smi: not found") == {}


def test_a_report_says_how_to_run_it_again_without_the_folder_of_its_results(
    modules: dict[str, ModuleType],
) -> None:
    command = modules["gpu_ranks"].command
    assert command([]) == "python benchmarks/gpu_ranks.py"
    for results in (["--results", "/here/out"], ["--results=/here/out"]):
        told = command(["--quick", *results, "--ranks", "2"])
        assert told == "python benchmarks/gpu_ranks.py --quick --ranks 2"


def test_what_nvidia_smi_underlines_is_plain_text_in_a_report(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(stdout="\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18\n", stderr="")

    monkeypatch.setattr(modules["gpu_ranks"].subprocess, "run", run)
    assert modules["gpu_ranks"].nvidia_smi("topo", "-m") == "GPU0\tGPU1\nGPU0\t X \tNV18"
