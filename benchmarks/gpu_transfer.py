"""How fast pages move between a CUDA device and pinned host memory, beside the link's ceiling.

    python benchmarks/gpu_transfer.py [--parts rates,draft,pairing,forward,interference,restore]

Rates: backup and load-back of 16384 tokens of a 32-layer MHA model, a 61-layer MLA model and a
one-layer draft, in pages of 64, 16 and 1, for each host layout. Each strategy, SGLang's own host
pools where SGLang is installed, and the ceiling take turns: every one once a round, and the rows
are medians over the rounds. The ceiling is one plain copy of as many bytes between a device buffer
and a host buffer that is pinned as a host pool is. Device and host pages are in random order, in
runs of four, or in a row; the host pool has twice as many. The bytes are random; they are compared
after poison before the first round. Draft: the draft's pages alone, by calls that follow each other
at once ("queue", eight), and by the same call again and again once the one before is done
("repeated"): in "rates" the processor did something else before each call. Pairing: what a
one-layer draft adds to a 32-layer target. Forward: what a forward pass takes whose layers wait for
a load-back of 8192 tokens, alone and while as many are backed up.
Interference: what copies cost a loop of matrix products beside them. Restore: 2 GiB from a file and
an lmdb store, in the page cache, to the device. Results go to `benchmarks/results/`.
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

import gpu_peer  # noqa: E402
from gpu_beside import interference, restore  # noqa: E402
from gpu_forward import forward  # noqa: E402
from gpu_pools import (  # noqa: E402
    SHAPES,
    VERBS,
    Ceiling,
    Results,
    Row,
    Slots,
    Way,
    add_rates,
    comes_back,
    device_pool,
    every_tensor,
    in_order,
    in_turns,
    layers_apart,
    ours,
    pools_for,
    timed_events,
)

from hicache_storage.pools.device import DevicePool  # noqa: E402
from hicache_storage.pools.geometry import PageGeometry  # noqa: E402
from hicache_storage.pools.layouts import LAYOUTS, Layout  # noqa: E402
from hicache_storage.pools.paired import PairedPools  # noqa: E402
from hicache_storage.pools.strategy import STRATEGIES  # noqa: E402

ROUNDS = {64: 7, 16: 3, 1: 3}
"""By page size."""
QUEUE = 8
"""Calls that follow each other at once."""
REPEATED, WARM = 9, 2
"""Calls of one way that follow each other, once the one before is done; the first ones don't
count."""
ORDERS = {64: ("random", "in runs of 4", "in a row"), 16: ("random",), 1: ("random",)}


def rates(results: Results, quick: bool) -> None:
    ceiling = Ceiling(2 << 30)
    shapes = SHAPES
    if quick:
        shapes = {name: replace(shape, layers=1) for name, shape in list(SHAPES.items())[1:]}
    for name, layout, page_size in itertools.product(shapes, LAYOUTS, ROUNDS):
        geometry = replace(shapes[name], page_size=page_size)
        rates_of(results, ceiling, name, geometry, device_pool(geometry), layout)
    apart = "MHA 32 layers, each allocated by itself"
    for layout in () if quick else ("layer_first", "page_first_direct"):
        geometry = SHAPES["MHA 32 layers"]
        rates_of(results, ceiling, apart, geometry, layers_apart(geometry), layout)


def rates_of(
    results: Results,
    ceiling: Ceiling,
    name: str,
    geometry: PageGeometry,
    pool: DevicePool,
    layout: Layout,
) -> None:
    """One shape in one layout, all ways in turns."""
    count, page_size = pool.num_pages, geometry.page_size
    size = count * geometry.page_bytes
    pools = pools_for(pool, layout)
    ways = {"ceiling": ceiling.way(size)}
    slots = {
        order: (in_order(order, count, count), in_order(order, 2 * count, count))
        for order in ORDERS[page_size]
    }
    for order, strategy in itertools.product(slots, STRATEGIES):
        if strategy != "auto" and order != "random":
            continue
        if strategy == "copy_engine" and page_size == 1:
            continue  # a copy a token and layer: nobody would choose it
        way = ours(pools, slots[order], strategy)
        way.before()
        if not comes_back(every_tensor(pool), way.backup, way.load):
            raise SystemExit(f"{name}, {layout}, {page_size}, {order}, {strategy}: bytes differ")
        ways[f"{strategy}, {order}"] = way
    peers = _peers(results, name, geometry, layout)
    for path, peer in peers.items():
        ways[f"SGLang {path}, in place"] = peer.in_place()
        if path == "kernel":
            ways[f"SGLang {path}, asked for"] = peer.asked_for()
    found = in_turns(ways, ROUNDS[page_size])
    add_rates(results, "rates", found, size, shape=name, layout=layout, page_size=page_size)
    if page_size == 64:
        _first_layer(results, name, layout, pools, slots["random"])
    for peer in peers.values():
        peer.close()


def _peers(
    results: Results, name: str, geometry: PageGeometry, layout: Layout
) -> dict[str, gpu_peer.Peer]:
    """SGLang's paths for this layout; they go by tokens, so in one page size only."""
    found = {}
    here = gpu_peer.is_here() and geometry.page_size == 64
    for path in gpu_peer.PATHS[layout] if here else ():
        about = {"shape": name, "layout": layout, "path": path}
        try:
            peer = gpu_peer.Peer(geometry, layout, path)
            equal = peer.equal()
        except Exception as error:
            results.add("peer", **about, error=f"{error!r:.300}")
            continue
        results.add("peer", **about, kernels=peer.kernels, bytes_equal=equal)
        found[path] = peer
    return found


def draft(results: Results, quick: bool) -> None:
    """What a small model's pages reach alone, where a call takes as long as some of its copies."""
    ceiling = Ceiling(1 << 30)
    name = "draft 1 layer"
    geometry = SHAPES[name]
    pool = device_pool(geometry)
    count = pool.num_pages
    size = count * geometry.page_bytes
    for layout in LAYOUTS[:1] if quick else LAYOUTS:
        pools = pools_for(pool, layout)
        slots = {
            order: (in_order(order, count, count), in_order(order, 2 * count, count))
            for order in ORDERS[64]
        }
        queue = {"ceiling": ceiling.way(size, QUEUE)}
        repeated = {"ceiling": ceiling.way(size)}
        for order, taken in slots.items():
            queue[f"auto, {order}"] = ours(pools, taken, "auto", QUEUE)
            repeated[f"auto, {order}"] = ours(pools, taken, "auto")
        repeated["kernel, random"] = ours(pools, slots["random"], "kernel")
        peers = _peers(results, name, geometry, layout)
        for path, peer in peers.items():
            repeated[f"SGLang {path}, in place"] = peer.in_place()
            if path == "kernel":
                repeated[f"SGLang {path}, asked for"] = peer.asked_for()
        about = {"shape": name, "layout": layout}
        add_rates(results, "queue", in_turns(queue, ROUNDS[64]), QUEUE * size, **about)
        again = in_turns(repeated, ROUNDS[64], REPEATED, WARM)
        add_rates(results, "repeated", again, size, **about)
        for peer in peers.values():
            peer.close()


def _first_layer(
    results: Results,
    name: str,
    layout: Layout,
    pools: PairedPools,
    slots: Slots,
) -> None:
    """When the forward pass could start, by the rule: once the call is back and the first layer is
    there. By the device's clock, which runs from the call on."""
    pages, host = slots
    pools.strategy = "auto"
    layers = pools.device.geometry.layers
    when = {"first": 0, "half": layers // 2, "last": layers - 1}
    found: dict[str, list[float]] = {"call": [], **{layer: [] for layer in when}}
    for _ in range(5):
        torch.cuda.synchronize()
        with timed_events():
            start = torch.cuda.Event()
            start.record()
            began = time.perf_counter()
            loading = pools.load_back(host, pages)
            found["call"].append((time.perf_counter() - began) * 1e3)
            loading.synchronize()  # which asks for all layers
        for layer, number in when.items():
            events = loading.events_of(number)
            found[layer].append(max(start.elapsed_time(event) for event in events))
    row = {f"{what}_ms": round(statistics.median(times), 2) for what, times in found.items()}
    results.add("first layer", shape=name, layout=layout, **row)


def pairing(results: Results, quick: bool) -> None:
    """Target alone and target with draft, in turns."""
    del quick
    target, draft = SHAPES["MHA 32 layers"], SHAPES["draft 1 layer"]
    pool, draft_pool = device_pool(target), device_pool(draft)
    count = pool.num_pages
    for layout in LAYOUTS:
        alone, paired = pools_for(pool, layout), pools_for(pool, layout)
        paired.register_draft(draft_pool)
        slots = in_order("random", count, count), in_order("random", 2 * count, count)
        ways: dict[str, Way] = {
            "target": ours(alone, slots, "auto"),
            "pair": ours(paired, slots, "auto"),
        }
        tensors = [*every_tensor(pool), *every_tensor(draft_pool)]
        if not comes_back(tensors, ways["pair"].backup, ways["pair"].load):
            raise SystemExit(f"pairing, {layout}: bytes differ")
        found = in_turns(ways, 11)
        for verb in VERBS:
            target_s, pair_s = found["target"].middle(verb), found["pair"].middle(verb)
            results.add(
                "pairing",
                layout=layout,
                verb=verb,
                target_ms=round(target_s * 1e3, 2),
                pair_ms=round(pair_s * 1e3, 2),
                added_percent=round(100 * (pair_s / target_s - 1), 2),
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
        columns = list(dict.fromkeys(name for row in rows for name in row))
        lines += ["", f"## {part.capitalize()}", "", "| " + " | ".join(columns) + " |"]
        lines.append("| " + " | ".join("---" for _ in columns) + " |")
        lines += [
            "| " + " | ".join(_shown(row.get(name)) for name in columns) + " |" for row in rows
        ]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    return "" if value is None else str(value)


PARTS: dict[str, Callable[[Results, bool], None]] = {
    "rates": rates,
    "draft": draft,
    "pairing": pairing,
    "forward": forward,
    "interference": interference,
    "restore": restore,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="less of each part, to try it out")
    parser.add_argument("--results", default=str(REPOSITORY / "benchmarks" / "results"))
    parser.add_argument("--name", default="gpu_transfer", help="name of the result files")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(1)
    results, about = Results(), machine()
    print(json.dumps(about), flush=True)
    directory = Path(options.results)
    directory.mkdir(parents=True, exist_ok=True)
    for part in options.parts.split(","):
        began = time.perf_counter()
        PARTS[part](results, options.quick)
        print(f"{part} took {time.perf_counter() - began:.0f} s", flush=True)
        everything = {"about": about, "results": results.rows}
        (directory / f"{options.name}.json").write_text(json.dumps(everything, indent=1))
        (directory / f"{options.name}.md").write_text(report(results, about))


if __name__ == "__main__":
    main()
