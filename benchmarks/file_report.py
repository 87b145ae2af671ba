"""What the file benchmark says: rates, ratios, ceilings of the machine, files of results."""

from __future__ import annotations

import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Took = dict[str, dict[str, list[tuple[float, float]]]]
"""{"write" or "read": {system: [(seconds, of them on a processor), ...]}}, a batch an entry."""


def rows(took: Took, page_bytes: int, shape: str, count: int) -> list[dict[str, Any]]:
    """One row a verb: medians of GB/s, and of the ratio of each pair of one round."""
    found = []
    for verb, systems in took.items():
        row: dict[str, Any] = {"verb": verb, "shape": shape, "page_bytes": page_bytes}
        row["pages"] = count
        for name, seconds in systems.items():
            row[f"{name}_gbs"] = page_bytes * count / statistics.median(s for s, _ in seconds) / 1e9
            row[f"{name}_cpu_us"] = statistics.median(cpu for _, cpu in seconds) / count * 1e6
            row[f"{name}_s"] = seconds
        if "sglang" in systems:
            both = list(zip(systems["file"], systems["sglang"], strict=True))
            low, middle, high = statistics.quantiles([b[0] / a[0] for a, b in both], n=4)
            row |= {"ratio": middle, "ratio_low": low, "ratio_high": high}
            row["cpu_ratio"] = statistics.median(b[1] / a[1] for a, b in both)
        found.append(row)
    return found


def line(row: Mapping[str, Any]) -> str:
    """One line of the table."""
    cells = [row["verb"], f"{row['page_bytes'] >> 10} KiB x {row['pages']}", row["shape"]]
    cells.append(f"{row['file_gbs']:.2f}")
    if "ratio" in row:
        cells += [
            f"{row['sglang_gbs']:.2f}",
            f"**{row['ratio']:.2f}**",
            f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}",
            f"{row['cpu_ratio']:.2f}",
            f"{row['sglang_cpu_us']:.0f}",
        ]
    cells += [f"{row['file_cpu_us']:.0f}", f"{row['calls_cpu_us']:.0f}"]
    return f"| {' | '.join(cells)} |"


def show(some: list[dict[str, Any]]) -> None:
    for row in some:
        print(line(row), flush=True)


def overheads(header: Took) -> dict[str, float]:
    """Share of Store's processor time that header, checksum and checks take, by verb."""
    return {
        verb: statistics.median(
            1 - bare[1] / whole[1]
            for whole, bare in zip(both["store"], both["backend"], strict=True)
        )
        for verb, both in header.items()
    }


def ceilings(directory: Path, sizes: Mapping[int, Any], rounds: int) -> list[dict[str, Any]]:
    """What one thread gets out of memory and of this file system without any names or checks:
    GB/s by page size. `direct` passes by the page cache, as dd with oflag=direct does."""
    found = []
    for page_bytes, (count, *_) in sizes.items():
        total = page_bytes * count
        source = mmap.mmap(-1, total)
        target = mmap.mmap(-1, total)
        a, b = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
        a[:] = np.random.default_rng(0).integers(0, 256, total, np.uint8)
        b[:] = 1
        row: dict[str, Any] = {"page_bytes": page_bytes, "pages": count}
        row["memcpy_gbs"] = _rate(lambda a=a, b=b: np.copyto(b, a), total, rounds)
        views = [memoryview(source)[i : i + page_bytes] for i in range(0, total, page_bytes)]
        into = [memoryview(target)[i : i + page_bytes] for i in range(0, total, page_bytes)]
        for title, flag in (("buffered", 0), ("direct", os.O_DIRECT)):
            path = directory / f"ceiling-{title}"
            try:
                row[f"{title}_write_gbs"] = _rate(
                    lambda p=path, f=flag, v=views: _write(p, f, v), total, rounds, path.unlink
                )
                _write(path, flag, views)
                row[f"{title}_read_gbs"] = _rate(
                    lambda p=path, f=flag, v=into: _read(p, f, v), total, rounds
                )
                path.unlink()
            except OSError:  # no O_DIRECT here
                path.unlink(missing_ok=True)
        for view in [*views, *into]:
            view.release()
        found.append(row)
    return found


def _rate(
    call: Callable[[], None], total: int, rounds: int, after: Callable[[], None] | None = None
) -> float:
    took = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
        if after is not None:
            after()
            os.sync()
    return total / statistics.median(took[1:]) / 1e9


def _write(path: Path, flag: int, views: list[memoryview]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    try:
        for number, view in enumerate(views):
            os.pwrite(fd, view, number * len(view))
    finally:
        os.close(fd)


def _read(path: Path, flag: int, views: list[memoryview]) -> None:
    fd = os.open(path, os.O_RDONLY | flag)
    try:
        for number, view in enumerate(views):
            os.preadv(fd, [view], number * len(view))
    finally:
        os.close(fd)


def write(
    options: Any,
    table: list[dict[str, Any]],
    header: Took,
    roof: list[dict[str, Any]],
    peer: str,
    directory: Path,
) -> None:
    """Prints the report and puts it, and all single figures, into the results folder."""
    from hicache_storage.backends.mounts import file_system

    about = {
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "machine": f"{os.cpu_count()} CPUs ({_cpu()}), Linux {platform.release()}",
        "file_system": file_system(str(directory)),
        "python": platform.python_version(),
        "peer": peer,
        "command": _command(bool(peer)),
        "rounds": options.rounds,
    }
    text = _markdown(about, table, overheads(header), roof)
    print(text)
    results = Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{options.name}.md").write_text(text)
    everything = {**about, "rows": table, "header_s": header, "ceilings": roof}
    (results / f"{options.name}.json").write_text(json.dumps(everything, indent=1) + "\n")


def _markdown(
    about: Mapping[str, Any],
    table: list[dict[str, Any]],
    header: Mapping[str, float],
    roof: list[dict[str, Any]],
) -> str:
    peer = about["peer"]
    lines = [
        "# file:// beside SGLang's file backend" if peer else "# file://",
        "",
        f"{about['date']} · {about['machine']} · {about['file_system']} · "
        f"Python {about['python']}{' · ' + peer if peer else ''}",
        "",
        f"    {about['command']}",
        "",
        f"Medians of {about['rounds']} rounds, GB/s; pages are new when written and in the page "
        "cache when read; file:// with header and checksum, durability=none. `scattered`: 64 "
        "spans a page.",
        "",
    ]
    columns = ["verb", "pages", "shape", "file://"]
    if peer:
        lines += [
            "The ratio is SGLang's time by ours, the median over the pairs of one round, with its "
            "quartiles; the next column is the same for processor time, which other work on the "
            "machine disturbs less. ",
        ]
        columns += ["SGLang", "ratio", "quartiles", "ratio of CPU", "CPU us a page, SGLang"]
    columns += ["CPU us a page, file://", "the same, system calls alone"]
    lines += ["", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    lines += [line(row) for row in table]
    lines += [
        "",
        "Header, checksum and checks take "
        + " and ".join(f"{share:.0%} of the time to {verb}" for verb, share in header.items())
        + " pages of 1 MiB (processor time).",
        "",
        "What the machine gives one thread, GB/s: memory to memory, one file for all pages.",
        "",
        "| pages | memcpy | write | read, cached | write, direct | read, direct |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in roof:
        cells = [f"{row['page_bytes'] >> 10} KiB x {row['pages']}"]
        for name in ("memcpy", "buffered_write", "buffered_read", "direct_write", "direct_read"):
            rate = row.get(f"{name}_gbs")
            cells.append("-" if rate is None else f"{rate:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [one.partition(":")[2].strip() for one in lines if one.startswith("model name")]
    return names[0] if names else platform.machine()


def _command(peer: bool) -> str:
    """How to run it again, without this machine's folders."""
    program = f"benchmarks/{Path(sys.argv[0]).name}"
    wanted = ["--peer-python", "PEER/bin/python"] if peer else []
    given = sys.argv[1:]
    for folder in ("--directory", "--results"):
        if folder in given:
            given[given.index(folder) + 1] = "DIR"
    return " ".join(["python", program, *wanted, *given])
