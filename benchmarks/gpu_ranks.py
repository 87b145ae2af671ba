"""How fast the ranks of one host back up and load back at once, each with a GPU of its own.

    python benchmarks/gpu_ranks.py [--ranks N] [--quick] [--results DIR]

One process a rank. Pages of a target and its one-layer draft, 16384 tokens of bfloat16 in pages of
64, between device slots and host slots in random order; host and device pools have twice as many.
MHA is a tensor-parallel rank's half of 8 heads. Each rank alone while the others idle, then all at
once: backup, load-back, and both ways together (three copies each way, asked for in turns by one
thread). The ceiling is plain copies of as many bytes in the same directions on the same ranks,
between buffers that are pinned as a host pool is; it takes turns with ours, and the rows are
medians over the rounds. Ranks start each copy at the same moment of the host's clock; what they
move together counts from the earliest start to the latest arrival. Of both ways together, one
way's own rate is a lower bound: an arrival isn't seen during a call. Bytes are drawn anew and
compared after poison for each case, moved as they were measured.

Without a GPU, `--device cpu` moves pages between pools in memory: to try the program out, not to
measure. Exit code 1 if bytes differ or a rank fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from gpu_pools import TOKENS, Results, Row  # noqa: E402
from rank_meeting import RankFailed, Ranks  # noqa: E402
from rank_pools import LAYOUTS, PAGE_SIZE, Options, work  # noqa: E402
from rank_rates import cases, rows  # noqa: E402

from hicache_storage.pools import numa  # noqa: E402

LINK = "pci.bus_id,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,\
pcie.link.width.max"


def nvidia_smi(*arguments: str) -> str:
    """What it prints, as plain text; what went wrong, if it does not."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout or done.stderr).strip()


def links(listed: str) -> dict[str, str]:
    """The PCIe link of each device, by address (0000:3b:00), from rows of LINK. Idle links may
    show a lower generation than the one that they work in."""
    found = {}
    for line in listed.splitlines():
        bus, *values = (value.strip() for value in line.split(","))
        if len(values) == 4:
            generation, highest, width, widest = values
            address = bus.lower()[-12:].partition(".")[0]
            found[address] = f"gen {generation} of {highest}, x{width} of x{widest}"
    return found


def command(arguments: list[str]) -> str:
    """How to run it again, without this machine's folders."""
    kept: list[str] = []
    for argument in arguments:
        if kept[-1:] == ["--results"]:
            kept.pop()
        elif not argument.startswith("--results="):
            kept.append(argument)
    return " ".join(["python", "benchmarks/gpu_ranks.py", *kept])


def machine(options: Options) -> Row:
    about: Row = {
        "date": time.strftime("%Y-%m-%d"),
        "ranks": options.ranks,
        "cpus": os.cpu_count(),
        "NUMA nodes": numa.nodes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": command(sys.argv[1:]),
        "tokens": options.tokens,
        "rounds": options.rounds,
    }
    if options.device == "cuda":
        about["cards"] = nvidia_smi(
            "--query-gpu=index,name,driver_version", "--format=csv,noheader"
        )
        about["links"] = nvidia_smi(f"--query-gpu={LINK}", "--format=csv,noheader")
        about["topology"] = nvidia_smi("topo", "-m")
    return about


def add(
    results: Results, found: list[Any], model: str, layout: str, size_bytes: int, options: Options
) -> bool:
    """Rows of what the ranks found of one model in one layout; whether all bytes were equal."""
    about: Row = {"model": model, "layout": layout, "MiB": size_bytes >> 20}
    all_equal = True
    for case, row in rows([each["found"] for each in found], cases(options.ranks)):
        ranks = case.ranks if row["rank"] == "together" else [row["rank"]]
        equal = all(found[rank]["equal"][case] for rank in ranks)
        all_equal &= equal
        results.add(case.when, **about, **row, bytes="equal" if equal else "DIFFER")
    for rank, each in enumerate(found):
        nodes = each["host_pool_MiB_by_node"]
        results.add("host pools", **about, rank=rank, MiB_by_node=nodes)
    return all_equal


def report(results: Results, about: Row) -> str:
    """Tables in Markdown."""
    texts = {name: str(value) for name, value in about.items()}
    lines = ["# Pages of several ranks at once", ""]
    lines += [f"- {name}: {text}" for name, text in texts.items() if "\n" not in text]
    for name, text in texts.items():
        if "\n" in text:
            lines += ["", f"{name.capitalize()}:", "", "```text", text, "```"]
    for part, table in results.rows.items():
        columns = list(dict.fromkeys(name for row in table for name in row))
        lines += ["", f"## {part.capitalize()}", "", "| " + " | ".join(columns) + " |"]
        lines.append("| " + " | ".join("---" for _ in columns) + " |")
        for row in table:
            shown = ("" if row.get(name) is None else str(row[name]) for name in columns)
            lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def write(directory: Path, results: Results, about: Row) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    everything = {"about": about, "results": results.rows}
    (directory / "gpu_ranks.json").write_text(json.dumps(everything, indent=1))
    (directory / "gpu_ranks.md").write_text(report(results, about))


def measure(options: Options, directory: Path) -> bool:
    """Runs the ranks and writes what they found after each model and layout."""
    began = time.perf_counter()
    results, about = Results(), machine(options)
    print(json.dumps(about), flush=True)
    all_equal = True
    with Ranks(options.ranks, work, options) as ranks:
        for rank, place in enumerate(ranks.receive()):
            link = links(about.get("links", "")).get(place.get("pci", ""))
            results.add("places", rank=rank, **place, link=link)
        print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
        for model in options.models():
            for layout in LAYOUTS:
                found = ranks.receive()
                size = options.size_bytes(model)
                all_equal &= add(results, found, model, layout, size, options)
                about["seconds"] = round(time.perf_counter() - began, 1)
                print(f"{model}, {layout} done after {about['seconds']} s", flush=True)
                write(directory, results, about)
        ranks.finish()
    return all_equal


def parsed() -> tuple[Options, Path]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="default: all GPUs that torch sees, or 2 on cpu")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="that one copy moves")
    parser.add_argument("--rounds", type=int, help="default: 5, or 3 with --quick")
    parser.add_argument("--quick", action="store_true", help="a quarter of the layers")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results, with GPUs only")
    given = parser.parse_args()
    if given.results is None and given.device == "cpu":
        parser.error("--device cpu measures no GPU: give --results, a folder for what it writes")
    here = torch.cuda.device_count() if given.device == "cuda" else None
    ranks = given.ranks if given.ranks is not None else 2 if here is None else here
    rounds = given.rounds if given.rounds is not None else 3 if given.quick else 5
    if here == 0:
        parser.error("torch sees no CUDA device; --device cpu tries the program out without one")
    if ranks < 1 or (here is not None and ranks > here):
        parser.error(f"--ranks {ranks}: torch sees {here} CUDA devices, each takes one rank")
    if given.tokens < PAGE_SIZE or given.tokens % PAGE_SIZE:
        parser.error(f"--tokens {given.tokens}: give a multiple of {PAGE_SIZE}, a page's tokens")
    if rounds < 1:
        parser.error(f"--rounds {rounds}: there must be at least 1")
    options = Options(given.device, ranks, given.tokens, rounds, given.quick)
    return options, given.results or REPOSITORY / "benchmarks" / "results"


def main() -> None:
    options, directory = parsed()
    try:
        equal = measure(options, directory)
    except RankFailed as failed:
        raise SystemExit(str(failed)) from None
    if not equal:
        raise SystemExit("bytes differ: see the rows that say so")


if __name__ == "__main__":
    main()
