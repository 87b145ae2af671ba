"""The report of a run: what was demanded, what was found, and every figure."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .demands import Demand
from .run import Row

RESULTS = Path(__file__).parents[1] / "results"
_MET = {True: "yes", False: "**no**", None: "not measured"}


def about(command: str, release: str, ranks: int) -> dict[str, Any]:
    """When, where and with what."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "SGLang": release,
        "GPUs": ranks,
        "Python": platform.python_version(),
    }
    gpu = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found["device"] = _output(gpu).splitlines()[:1] or ["no GPU"]
    with open("/proc/cpuinfo") as lines:
        names = [one.partition(":")[2].strip() for one in lines if one.startswith("model name")]
    found["processor"] = f"{len(names)} cores, {names[0] if names else platform.machine()}"
    found["SeaweedFS"] = _output(["weed", "version"]).partition("GB ")[2].partition(" ")[0]
    for package in ("torch", "hicache_storage"):
        found[package] = _version(package)
    return found


def write(
    name: str, facts: dict[str, Any], demands: Sequence[Demand], rows: Sequence[Row], folder: Path
) -> Path:
    """The report as `<name>.md` in `folder`; its path. `<name>.jsonl` beside it has the rows."""
    path = folder / f"{name}.md"
    path.write_text(text(facts, demands, rows))
    return path


def text(facts: dict[str, Any], demands: Sequence[Demand], rows: Sequence[Row]) -> str:
    """The report in Markdown."""
    unmet = sum(demand.met is False for demand in demands)
    missing = sum(demand.met is None for demand in demands)
    ranks = facts["GPUs"]
    lines = [
        f"# SGLang {facts['SGLang']} with this package's stores, "
        f"{'one GPU' if ranks == 1 else f'{ranks} GPUs'}",
        "",
        f"{facts['date']} · {ranks} x {facts['device'][0]} · {facts['processor']} · "
        f"Python {facts['Python']}, torch {facts['torch']}, hicache-storage "
        f"{facts['hicache_storage']}, SeaweedFS {facts['SeaweedFS'] or '?'}",
        "",
        f"    {facts['command']}",
        "",
        f"Demands met: {len(demands) - unmet - missing} of {len(demands)}; not met: {unmet}; not "
        f"measured: {missing}.",
        "",
        "`restarted` is another process than `cold`, and was asked after that one had ended (it "
        "started while that one was measured). Stages after it are of the same process, which "
        "empties device and host memory before each. All stores are on the machine's own disk, and "
        "what is read is in the page cache.",
        "",
        "## As demanded",
        "",
        *table(
            ("demand", "store", "wanted", "found", "as demanded"),
            ([d.what, d.where, d.wanted, d.found, _MET[d.met]] for d in demands),
        ),
        "",
        "## Accept length",
        "",
        *table(
            ("pair", "store", "stage", "ranks", "accept length", "device, host, storage tokens",
             "same text", "first token s", "all tokens s"),
            (
                [r["pair"], r["store"], r["stage"], r["ranks"], r["accept_length"], _cached(r),
                 "yes" if r["same_text"] else "no", r["first_token_s"], r["seconds"]]
                for r in _of("accept", rows)
            ),
        ),
    ]  # fmt: skip
    if summaries := list(_of("first token", rows)):
        lines += [
            "",
            "## Time to first token, everything from storage",
            "",
            "Each round asks all stores in turn. The ratio is of medians, the quartiles are of the "
            "rounds' own ratios.",
            "",
            *table(
                ("pages", "prompt", "store", "rounds", "median s", "ratio", "quartiles"),
                (
                    [r["model"], r["prompt_tokens"], r["store"], r["rounds"], r["median_s"],
                     r.get("ratio", "-"), " to ".join(map(str, r.get("quartiles", "-")))]
                    for r in summaries
                ),
            ),
        ]  # fmt: skip
    starts = list(_of("start", rows))
    if starts:
        slowest = max(starts, key=lambda row: row["ready_s"])
        lines += [
            "",
            f"{len(starts)} servers were started, several at once; the slowest, "
            f"{slowest['server']}, answered after {slowest['ready_s']} s.",
        ]
    if failures := list(_of("failure", rows)):
        lines += ["", "## What went wrong", ""]
        lines += [f"- {row['what']}: {row['why']}" for row in failures]
    return "\n".join(lines) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    return [
        f"| {' | '.join(heads)} |",
        f"|{' --- |' * len(heads)}",
        *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows),
    ]


def _of(part: str, rows: Iterable[Row]) -> Iterable[Row]:
    return (row for row in rows if row["part"] == part)


def _cached(row: Row) -> str:
    cached = row["cached"]
    return ", ".join(str(cached.get(level, 0)) for level in ("device", "host", "storage"))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return ""
    return done.stdout


def _version(package: str) -> str:
    from importlib import import_module

    try:
        return str(import_module(package).__version__)
    except ImportError:
        return "none"
