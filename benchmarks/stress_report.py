"""Runs the stress program on file, lmdb, s3 on SeaweedFS and redis, and writes the results.

    python benchmarks/stress_report.py [--seconds 60] [--output FILE]

What it needs: see places.py. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from places import ROOT, Places, machine, places, version
from stress import HEADINGS, row

CAPACITY = "96MiB"
MAXMEMORY = ("--maxmemory", "96mb", "--maxmemory-policy", "allkeys-lru")


def stores(made: Places) -> dict[str, str]:
    """What the table calls each store, and its URL."""
    return {
        "file": made.file(capacity=CAPACITY),
        "lmdb": made.lmdb(capacity=CAPACITY),
        "s3 on SeaweedFS": made.seaweedfs(),
        "redis": made.redis(*MAXMEMORY),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/stress.md"))
    options = parser.parse_args(argv)
    processes, threads = 4, 4
    rows, complaints, good = [], [], True
    with tempfile.TemporaryDirectory(prefix="stress-") as folder, places(Path(folder)) as made:
        for name, url in stores(made).items():
            done = subprocess.run(
                [
                    sys.executable, str(ROOT / "benchmarks/stress.py"), url, "--json",
                    "--processes", str(processes), "--threads", str(threads),
                    "--seconds", str(options.seconds),
                ],
                capture_output=True, text=True, check=False,
                timeout=options.seconds * 3 + 300,
            )  # fmt: skip
            good = good and done.returncode == 0
            complaints += done.stderr.splitlines()[-20:]
            if done.stdout:
                rows.append(row(name, json.loads(done.stdout), processes))
            print(rows[-1] if done.stdout else f"{name}: {done.stderr}", flush=True)
    load = f"{os.getloadavg()[0]:.1f}"
    lines = [
        "# Stress: several processes and threads on one store",
        "",
        f"{time.strftime('%Y-%m-%d')}; {machine()}; load average {load} at the end, up to "
        f"{processes * threads} of it by these threads, the rest other work; "
        f"{version('redis-server', '--version').partition(' sha')[0]}; "
        f"SeaweedFS {version('weed', 'version').partition('GB ')[2].partition(' ')[0]}.",
        "",
        f"    python benchmarks/stress_report.py --seconds {options.seconds:g}",
        "",
        f"Pages of 64 KiB and 32 KiB, all together 256 MiB. file and lmdb have a capacity of "
        f"{CAPACITY}, Redis has `{' '.join(MAXMEMORY)}`; S3 has no limit, so there every page that "
        "was acknowledged and not deleted must be found again. `benchmarks/stress.py` says what "
        "counts as wrong; `bad on the way` are pages that the store's own check turned into "
        "misses, which fails the run too.",
        "",
        "| " + HEADINGS + " |",
        "|" + " --- |" * (HEADINGS.count("|") + 1),
        *rows,
        "",
    ]
    Path(options.output).write_text("\n".join(lines))
    print("\n".join(complaints), file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
