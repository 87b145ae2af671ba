"""How fast pages move between a CUDA device and pinned host memory, beside the link's ceiling.

    python benchmarks/gpu_transfer.py [--parts rates,pairing,interference,restore]

Rates: backup and load-back of 16384 tokens of a 32-layer MHA model, a 61-layer MLA model and a
one-layer draft, in pages of 64, 16 and 1, for each host layout and each strategy. The pages are in
random order and scattered over a host pool of twice their number, except where "in a row" is said;
the bytes are random, and compared after each case. Pairing: what a one-layer draft adds
to a 32-layer target. Interference: what copies cost a loop of matrix products beside them.
Restore: 2 GiB from a file store in the page cache to the device. The ceiling is the median rate of
1 GiB copies between one pinned and one device buffer. Results go to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from gpu_beside import interference, restore  # noqa: E402
from gpu_pools import (  # noqa: E402
    SHAPES,
    Results,
    Row,
    Times,
    device_pool,
    every_tensor,
    layers_apart,
)

from hicache_storage.pools.device import DevicePool  # noqa: E402
from hicache_storage.pools.layouts import LAYOUTS, Layout  # noqa: E402
from hicache_storage.pools.memory import HostMemory  # noqa: E402
from hicache_storage.pools.paired import PairedPools  # noqa: E402
from hicache_storage.pools.strategy import STRATEGIES, Strategy  # noqa: E402


def ceiling(results: Results) -> None:
    """The rate of plain copies, each way."""
    size = 1 << 30
    memory = HostMemory(size, pin=True)  # pinned as long as this lives
    host = memory.tensor
    device = torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 256)
    row = {}
    for name, to, source in (("backup", host, device), ("load", device, host)):
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        row[f"{name}_GBps"] = round(size / statistics.median(times[2:]) / 1e9, 2)
    results.add("ceiling", **row)


def timed(pools: PairedPools, device: torch.Tensor, host: torch.Tensor, repeats: int) -> Times:
    """Seconds of backups and load-backs, of the calls alone, and until layer 0 may be used."""
    times: Times = {name: [] for name in ("backup", "backup_call", "load", "load_call", "first")}
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        moved = pools.backup(device, host)
        times["backup_call"].append(time.perf_counter() - start)
        moved.wait()
        times["backup"].append(time.perf_counter() - start)
        start = time.perf_counter()
        loading = pools.load_back(host, device)
        times["load_call"].append(time.perf_counter() - start)
        while not loading.arrived(0):
            pass
        times["first"].append(time.perf_counter() - start)
        loading.synchronize()
        times["load"].append(time.perf_counter() - start)
    return {name: found[1:] for name, found in times.items()}


def rates(results: Results) -> None:
    for (name, shape), layout, page_size in itertools.product(SHAPES.items(), LAYOUTS, (64, 16, 1)):
        geometry = replace(shape, page_size=page_size)
        strategies: tuple[Strategy, ...] = ("auto", "kernel")
        if page_size == 64:
            strategies = STRATEGIES
        elif shape.layers == 1:
            strategies = ("auto",)
        for strategy in strategies:
            one_rate(results, name, device_pool(geometry), layout, strategy)
    mha = SHAPES["MHA 32 layers"]
    for layout, page_size in itertools.product(LAYOUTS, (64, 16)):
        pool = device_pool(replace(mha, page_size=page_size))
        one_rate(results, "MHA 32 layers, in a row", pool, layout, "auto", scattered=False)
    for layout in ("layer_first", "page_first_direct"):
        name = "MHA 32 layers, each allocated by itself"
        one_rate(results, name, layers_apart(mha), layout, "auto")


def one_rate(
    results: Results,
    name: str,
    pool: DevicePool,
    layout: Layout,
    strategy: Strategy,
    *,
    scattered: bool = True,
) -> None:
    count = pool.num_pages
    pools = PairedPools(pool, host_pages=2 * count, layout=layout, strategy=strategy)
    size = count * pool.geometry.page_bytes
    pages, slots = torch.randperm(count), torch.randperm(2 * count)[:count]
    if not scattered:
        pages, slots = torch.arange(count), torch.arange(count)
    pools.backup(pages, slots).wait()
    kept = [tensor.clone() for tensor in every_tensor(pool)]
    for tensor in every_tensor(pool):
        tensor.fill_(0xAB)
    pools.load_back(slots, pages).synchronize()
    equal = all(map(torch.equal, kept, every_tensor(pool)))
    del kept
    times = timed(pools, pages, slots, 7 if pool.geometry.page_size == 64 else 5)
    middle = {key: statistics.median(found) for key, found in times.items()}
    results.add(
        "rates",
        shape=name,
        layout=layout,
        page_size=pool.geometry.page_size,
        strategy=strategy,
        MiB=size >> 20,
        backup_GBps=round(size / middle["backup"] / 1e9, 2),
        load_GBps=round(size / middle["load"] / 1e9, 2),
        backup_call_ms=round(middle["backup_call"] * 1e3, 2),
        load_call_ms=round(middle["load_call"] * 1e3, 2),
        first_layer_ms=round(middle["first"] * 1e3, 2),
        load_ms=round(middle["load"] * 1e3, 2),
        bytes_equal=equal,
    )


def pairing(results: Results) -> None:
    """Target alone and target with draft, in turns."""
    target, draft = SHAPES["MHA 32 layers"], SHAPES["draft 1 layer"]
    pool, draft_pool = device_pool(target), device_pool(draft)
    for layout in LAYOUTS:
        count = pool.num_pages
        sides = [PairedPools(pool, host_pages=2 * count, layout=layout) for _ in range(2)]
        sides[1].register_draft(draft_pool)
        pages, slots = torch.randperm(count), torch.randperm(2 * count)[:count]
        found: list[Times] = [{}, {}]
        for _ in range(7):
            for side, times in zip(sides, found, strict=True):
                for key, values in timed(side, pages, slots, 1).items():
                    times.setdefault(key, []).extend(values)
        for verb in ("backup", "load"):
            alone, paired = (statistics.median(times[verb]) for times in found)
            results.add(
                "pairing",
                layout=layout,
                verb=verb,
                target_ms=round(alone * 1e3, 2),
                paired_ms=round(paired * 1e3, 2),
                added_percent=round(100 * (paired / alone - 1), 2),
                bytes_percent=round(100 * draft.page_bytes / target.page_bytes, 2),
            )


def machine() -> Row:
    card = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": card,
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
    }


def report(results: Results, about: Row) -> str:
    """Tables in Markdown."""
    lines = ["# Pages between device and host", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    for part, rows in results.rows.items():
        lines += ["", f"## {part.capitalize()}", "", "| " + " | ".join(rows[0]) + " |"]
        lines.append("| " + " | ".join("---" for _ in rows[0]) + " |")
        lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


PARTS = {
    "rates": rates,
    "pairing": pairing,
    "interference": interference,
    "restore": restore,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--results", default=str(REPOSITORY / "benchmarks" / "results"))
    parser.add_argument("--name", default="gpu_transfer", help="name of the result files")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(1)
    results, about = Results(), machine()
    print(json.dumps(about))
    directory = Path(options.results)
    directory.mkdir(parents=True, exist_ok=True)
    ceiling(results)
    for part in options.parts.split(","):
        PARTS[part](results)
        ceiling(results)
        everything = {"about": about, "results": results.rows}
        (directory / f"{options.name}.json").write_text(json.dumps(everything, indent=1))
        (directory / f"{options.name}.md").write_text(report(results, about))


if __name__ == "__main__":
    main()
