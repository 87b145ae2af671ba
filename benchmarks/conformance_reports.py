"""Runs `hicache-storage check` on every kind of store and writes docs/conformance-reports.md.

    python benchmarks/conformance_reports.py [NAME ...] [--results FOLDER] [--output FILE]

Each report is kept as JSON in a folder, so that named stores can be checked anew without the
others. What it needs: see places.py. The exit status is 1 if a clause fails anywhere, 2 if a
check could not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from places import ROOT, Places, machine, places

STORES: dict[str, tuple[str, Callable[[Places], str]]] = {
    "memory": ("memory://", Places.memory),
    "file": ("file://, no limit", Places.file),
    "file with a capacity": ("file://, 1 GiB", lambda made: made.file(capacity="1GiB")),
    "lmdb": ("lmdb://, no limit", Places.lmdb),
    "lmdb with a capacity": ("lmdb://, 1 GiB", lambda made: made.lmdb(capacity="1GiB")),
    "s3 on moto": ("s3:// on moto", Places.moto),
    "s3 on SeaweedFS": ("s3:// on SeaweedFS", Places.seaweedfs),
    "s3 on Ceph": ("s3:// on a Ceph radosgw", Places.ceph),
    "fsspec on local files": ("fsspec://file", Places.fsspec_file),
    "fsspec on memory": ("fsspec://memory", Places.fsspec_memory),
    "fsspec on s3fs": ("fsspec://s3 through s3fs on SeaweedFS", Places.fsspec_s3),
    "redis": ("redis://, one server", Places.redis),
    "redis cluster": ("redis://, a cluster of three", Places.redis_cluster),
    "tier of lmdb over s3": ("tier:// of lmdb over s3 on SeaweedFS", Places.tier),
}
HEAD = """\
# Conformance reports

What [the conformance kit](conformance.md) says of every backend here, on real servers where there
are any. `make reports` makes this page: it runs `hicache-storage check URL --destructive` on stores
made for it. A clause is not selected where the backend lacks what it needs; the reason stands
beside it. Seconds are those of a machine that did other work too: they say what a check costs, not
how fast a store is.
"""


def check(name: str, made: Places, folder: Path) -> None:
    """Leaves the report as JSON. Raises RuntimeError if the check could not run."""
    place = folder / f"{name.replace(' ', '-')}.json"
    started_s = time.monotonic()
    done = subprocess.run(
        [
            sys.executable, "-m", "hicache_storage", "check", STORES[name][1](made),
            "--destructive", "--report", "json",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    report = json.loads(done.stdout)
    report["wall_s"] = time.monotonic() - started_s
    report["made"] = f"{time.strftime('%Y-%m-%d')}; {machine()}"
    place.write_text(json.dumps(report, indent=1))


def page(reports: dict[str, dict[str, Any]]) -> str:
    """The whole page: one row a store, then each report, folded."""
    lines = [
        HEAD,
        "| store | package | passed | failed | not selected | seconds |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, report in reports.items():
        counts = report["counts"]
        deviating = counts.get("deviates", 0)
        failed = sum(counts.values()) - counts.get("passed", 0) - counts.get("not selected", 0)
        lines.append(
            f"| {STORES[name][0]} | {report['distribution']} | {counts.get('passed', 0)} | "
            f"{failed - deviating} | {counts.get('not selected', 0)} | {report['wall_s']:.0f} |"
        )
    made = sorted({report["made"] for report in reports.values()})
    kits = sorted({report["kit"] for report in reports.values()})
    lines += ["", f"Kit: hicache-storage {', '.join(kits)}. Made: {'. '.join(made)}.", ""]
    for name, report in reports.items():
        lines += [*details(name, report), ""]
    return "\n".join(lines).rstrip() + "\n"


def details(name: str, report: dict[str, Any]) -> list[str]:
    hooks = ", ".join(report["capabilities"]) or "none"
    counts = ", ".join(f"{count} {result}" for result, count in report["counts"].items())
    lines = [
        f"## {name}",
        "",
        f"Scope: {report['scope']}; optional hooks: {hooks}.",
        "",
        "<details>",
        f"<summary>{counts}</summary>",
        "",
        "| clause | rule | result | seconds | reason |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for one in report["clauses"]:
        seconds = "" if one["result"] == "not selected" else f"{one['seconds']:.2f}"
        cells = (one["clause"], one["title"], one["result"], seconds, one["reason"])
        cells = tuple(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", "</details>"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(STORES))
    parser.add_argument("--results", default=str(ROOT / "build/conformance"))
    parser.add_argument("--output", default=str(ROOT / "docs/conformance-reports.md"))
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(STORES):
        parser.error(f"no such store: {', '.join(sorted(unknown))}; there are {', '.join(STORES)}")
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    broken = []
    with tempfile.TemporaryDirectory(prefix="reports-") as scratch, places(Path(scratch)) as made:
        for name in options.names or STORES:
            try:
                check(name, made, folder)
                print(f"{name}: done", flush=True)
            except (RuntimeError, ImportError, subprocess.SubprocessError) as error:
                broken.append(name)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    files = {name: folder / f"{name.replace(' ', '-')}.json" for name in STORES}
    reports = {name: json.loads(p.read_text()) for name, p in files.items() if p.exists()}
    Path(options.output).write_text(page(reports))
    if broken:
        return 2
    return 0 if all(report["passed"] for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
