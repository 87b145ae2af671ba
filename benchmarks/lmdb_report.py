"""What the LMDB benchmarks say: rates, ratios, the machine, files of results."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hicache_storage.backends.mounts import file_system


class Seconds(NamedTuple):
    """What a call took."""

    wall: float
    cpu: float


Took = dict[str, dict[str, list[Seconds]]]
"""By verb and by backend, one entry a round."""


def rows(took: Took, page_bytes: int, count: int) -> list[dict[str, Any]]:
    """One row a verb: medians of each side, and of the ratio (how many times faster lmdb is)."""
    found = []
    for verb, sides in took.items():
        row: dict[str, Any] = {"verb": verb, "page_bytes": page_bytes, "pages": count}
        for kind in ("wall", "cpu"):
            by_side = {
                name: [getattr(one, kind) for one in seconds] for name, seconds in sides.items()
            }
            ratios = [
                file / max(own, 1e-9)
                for own, file in zip(by_side["lmdb"], by_side["file"], strict=True)
            ]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row[kind] = {name: statistics.median(values) for name, values in by_side.items()}
            row[f"{kind}_ratio"] = {"median": middle, "low": low, "high": high}
        row["samples"] = {name: [list(one) for one in seconds] for name, seconds in sides.items()}
        found.append(row)
    return found


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    wall, cpu, ratio = row["wall"], row["cpu"], row["wall_ratio"]
    if row["verb"] == "lookup":
        rates = [f"{wall[side] / row['pages'] * 1e6:.1f} us" for side in ("lmdb", "file")]
    else:
        total = row["page_bytes"] * row["pages"]
        rates = [f"{total / wall[side] / 1e9:.2f} GB/s" for side in ("lmdb", "file")]
    each = [f"{cpu[side] / row['pages'] * 1e6:.1f}" for side in ("lmdb", "file")]
    cold = row.get("resident")
    note = "" if cold is None else f"{cold['lmdb']:.1%} / {cold['file']:.1%}"
    return (
        f"| {row['page_bytes'] >> 10} KiB | {row['verb']} | {rates[0]} | {rates[1]} | "
        f"{ratio['median']:.2f} | {ratio['low']:.2f} to {ratio['high']:.2f} | "
        f"{each[0]} / {each[1]} | {row['cpu_ratio']['median']:.2f} | {note} |"
    )


def show(some: Iterable[dict[str, Any]]) -> None:
    for row in some:
        print(line(row), flush=True)


def resident(paths: Iterable[str]) -> float:
    """Share of the files that is in the page cache, as mincore says."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = inside = 0
    for path in paths:
        length = os.path.getsize(path)
        if not length:
            continue
        fd = os.open(path, os.O_RDWR)
        try:
            with mmap.mmap(fd, length, mmap.MAP_SHARED) as view:
                count = -(-length // mmap.PAGESIZE)
                answer = (ctypes.c_ubyte * count)()
                start = ctypes.c_char.from_buffer(view)
                if libc.mincore(ctypes.byref(start), ctypes.c_size_t(length), answer):
                    raise OSError(ctypes.get_errno(), "mincore")
                del start
                pages += count
                inside += sum(one & 1 for one in answer)
        finally:
            os.close(fd)
    return inside / pages if pages else 0.0


def settle_allocator() -> None:
    """Brings the allocator into the state that it has in a server: once a large array was freed,
    it keeps memory of that size instead of giving it back each time."""
    large = bytearray(31 << 20)
    del large


def read_ahead_kb(scratch: Path) -> int | None:
    """How far the kernel reads ahead on the device of this directory."""
    device = os.stat(scratch).st_dev
    for place in ("queue", "../queue"):
        path = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/{place}/read_ahead_kb")
        if path.exists():
            return int(path.read_text())
    return None


def machine(scratch: Path) -> dict[str, Any]:
    """Where it was measured."""
    model = ""
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            model = text.partition(":")[2].strip()
            break
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "lmdb": importlib.metadata.version("lmdb"),
        "file_system": file_system(str(scratch)),
        "read_ahead_kb": read_ahead_kb(scratch),
        "free_gib": round(os.statvfs(scratch).f_bavail * os.statvfs(scratch).f_frsize / 2**30),
    }


def headline(
    options: argparse.Namespace, scratch: Path, load: list[float]
) -> tuple[dict[str, Any], str]:
    """The machine, and a paragraph that says so."""
    about = {**machine(scratch), "rounds": options.rounds, "load": [round(one, 1) for one in load]}
    text = (
        f"{about['date']}: {about['processor']}, {about['cores']} cores, "
        f"{about['memory_gib']} GiB, Linux {about['kernel']}, {about['file_system']} "
        f"(read_ahead_kb {about['read_ahead_kb']}), "
        f"Python {about['python']}, lmdb {about['lmdb']}. Batches of 128 pages; medians of "
        f"{about['rounds']} rounds in alternating order. Load average while it ran: "
        f"{', '.join(map(str, about['load']))}."
        f"{' ' + options.note if options.note else ''}"
    )
    return about, text


def save(options: argparse.Namespace, name: str, document: Any, text: str) -> None:
    results = Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (results / f"{name}.md").write_text(text)


def write(
    options: argparse.Namespace,
    name: str,
    found: list[dict[str, Any]],
    scratch: Path,
    load: list[float],
) -> None:
    """Writes `<name>.json` and `<name>.md`: lmdb:// beside file://."""
    about, text = headline(options, scratch, load)
    lines = [
        "# lmdb:// beside file://",
        "",
        f"{text} The ratio is the median of each round's own ratio, above 1 where lmdb:// is "
        "faster, with its quartiles.",
        "",
        "| page | verb | lmdb:// | file:// | ratio | quartiles | CPU us a page (lmdb / file) | "
        "CPU ratio | resident before (lmdb / file) |",
        "|" + " --- |" * 9,
        *map(line, found),
    ]
    save(options, name, {"machine": about, "rows": found}, "\n".join(lines) + "\n")


def table(title: str, found: list[dict[str, Any]]) -> str:
    """A table of rows that need not have the same columns."""
    columns = list(dict.fromkeys(column for row in found for column in row))

    def cell(row: dict[str, Any], column: str) -> str:
        value = row.get(column, "")
        if column == "page_bytes":
            return f"{value >> 10} KiB"
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    head = ["page" if column == "page_bytes" else column for column in columns]
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {' | '.join(cell(row, column) for column in columns)} |" for row in found]
    return "\n".join(lines) + "\n"


def write_tables(
    options: argparse.Namespace,
    name: str,
    found: dict[str, list[dict[str, Any]]],
    scratch: Path,
    load: list[float],
) -> None:
    """Writes `<name>.json` and `<name>.md`: one table a choice; rates in GB/s."""
    about, text = headline(options, scratch, load)
    tables = "\n".join(table(title, rows) for title, rows in found.items())
    whole = f"# The choices of lmdb://\n\n{text} Rates in GB/s.\n\n{tables}"
    save(options, name, {"machine": about, **found}, whole)
