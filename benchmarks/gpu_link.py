"""What one GPU's link does with pieces of memory: the readings behind `pools/strategy.py`.

    python benchmarks/gpu_link.py [--parts plain,pieces,rows,kernel,bulk,beside] [--results DIR]

Bytes lie in random pages of registered host memory, and twice as many are there; they are taken in
the order of the host's. Each configuration moves random bytes out, and back after poison, and they
are compared, before it is timed; then all of a size take turns, and the rows are medians of five
rounds after one to warm up. `bulk` compiles `gpu_link.cu` with nvcc for compute capability 9.0
and says so where it can't. Some 40 s on an H200. Exit code 1 if bytes differ or a part fails; the
parts that went well are written all the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from gpu_beside import Products  # noqa: E402
from gpu_link_moves import KIB, Compiled, Ends, Move, Pages, busy, plain  # noqa: E402
from gpu_pools import VERBS, Results, Row, Times, draw, in_turns, no_collection  # noqa: E402
from gpu_transfer import machine  # noqa: E402

PIECES_KIB = (8, 32, 64, 72, 128, 256, 512, 1024)
MOST_PIECES = 16384
ROWS_KIB = ((8, 64), (16, 64), (24, 64), (32, 64), (48, 64), (64, 256), (128, 256))
"""Bytes of a row, and from row to row in the host."""
STRETCHES_KIB = (2, 8, 72, 128)
MOST_STRETCHES = 131072
PROGRAMS = (1, 2, 4, 8, 16)
CALLS = ((1, 64), (2, 256))
"""Streams, and copies a call."""
BULK: dict[str, dict[str, tuple[int, ...]]] = {
    "wide": {"backup": (2, 32 * KIB, 6, 3), "load": (2, 16 * KIB, 12, 3)},
    "slim": {"backup": (8, 4 * KIB, 3, 1), "load": (16, 4 * KIB, 3, 1)},
}
"""Thread groups of one warp, bytes of a stage, stages, and stores that may still be reading: the
best of 1 to 32 groups, stages of 2 to 32 KiB and 2 to 32 of them, with all of a multiprocessor's
shared memory and with so little that other kernels find room beside it."""
PLAIN_GROUPS: dict[str, tuple[int, ...]] = {"backup": (4,), "load": (4,)}
BESIDE_TIMES = 4
COLUMNS = {"backup": "out", "load": "back"}


@dataclass
class Setting:
    """What parts share."""

    results: Results
    ends: Ends
    kernels: Compiled
    rounds: int
    size_bytes: int


def rates(times: Times, size_bytes: int, by_events: bool) -> Row:
    """GB/s out and back: of the whole, with the call's milliseconds, or between two events."""
    row: Row = {}
    for verb, name in COLUMNS.items():
        seconds = statistics.median(times.call[verb]) if by_events else times.middle(verb)
        row[f"{name}_GBps"] = round(size_bytes / seconds / 1e9, 2)
        if not by_events:
            row[f"{name}_call_ms"] = times.call_ms(verb)
    return row


def measure(
    setting: Setting, part: str, moves: dict[str, Move], by_events: bool, **about: Any
) -> None:
    """A row for each, compared first, then timed in turns."""
    equal = {name: move.equal() for name, move in moves.items()}
    ways = {n: m.way_by_events() if by_events else m.way() for n, m in moves.items()}
    for name, times in in_turns(ways, setting.rounds).items():
        size = moves[name].size_bytes
        found = rates(times, size, by_events)
        setting.results.add(part, **about, way=name, MiB=size >> 20, **found, bytes=equal[name])


def plain_copies(setting: Setting) -> None:
    """One copy each way, and a copy each way at once."""
    ends = setting.ends
    half = len(ends.device)
    one = plain(ends.device, ends.host[:half], ends.streams[0])
    measure(setting, "plain", {"one way at a time": one}, False)
    other = plain(torch.empty_like(ends.device), ends.host[half:], ends.streams[1])
    equal = _both_equal(one, other)
    found: list[tuple[float, ...]] = []
    with no_collection():
        for turn in range(setting.rounds + 1):
            seconds = _both(one, other)
            if turn:
                found.append(seconds)
    middle = map(statistics.median, zip(*found, strict=True))
    row = {
        f"{name}_GBps": round(half / seconds / 1e9, 2)
        for name, seconds in zip(COLUMNS.values(), middle, strict=True)
    }
    setting.results.add("plain", way="both at once", MiB=half >> 20, **row, bytes=equal)


def _both(out: Move, back: Move) -> tuple[float, ...]:
    """Seconds from one start to the end of each."""
    begin, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    busy(out.streams[0])
    begin.record(out.streams[0])
    back.streams[0].wait_event(begin)
    for move, verb, end in zip((out, back), VERBS, ends, strict=True):
        move.ask(verb)
        end.record(move.streams[0])
    torch.cuda.synchronize()
    return tuple(begin.elapsed_time(end) / 1e3 for end in ends)


def _both_equal(out: Move, back: Move) -> str:
    """The host gets what `back` will bring first; what `out` took there is fetched and compared."""
    draw([out.device, back.device])
    torch.cuda.synchronize()
    back.way().backup()
    kept = [move.device.clone() for move in (out, back)]
    back.device.fill_(0xAB)
    _both(out, back)
    out.device.fill_(0xAB)
    torch.cuda.synchronize()
    out.way().load()
    same = all(map(torch.equal, kept, (out.device, back.device)))
    return "equal" if same else "DIFFER"


def pieces(setting: Setting) -> None:
    for kib in PIECES_KIB:
        size = min(setting.size_bytes, MOST_PIECES * kib * KIB)
        pages = Pages.stretches(setting.ends, kib * KIB, size)
        moves = {
            f"{a_call} a call, {streams} stream{'s' * (streams > 1)}": pages.batches(
                streams, a_call
            )
            for streams, a_call in CALLS
        }
        measure(setting, "pieces", moves, False, KiB=kib)


def rows(setting: Setting) -> None:
    for kib, pitch_kib in ROWS_KIB:
        pages = Pages.rows(setting.ends, kib * KIB, pitch_kib * KIB)
        moves = {"64 a call, 1 stream": pages.batches(1, 64)}
        measure(setting, "rows", moves, False, row_KiB=kib, apart_KiB=pitch_kib)


def _stretches(setting: Setting, kib: int) -> Pages:
    size = min(setting.size_bytes // 2, MOST_STRETCHES * kib * KIB)
    return Pages.stretches(setting.ends, kib * KIB, size)


def kernel(setting: Setting) -> None:
    for kib in STRETCHES_KIB:
        with_programs = _stretches(setting, kib).kernel()
        moves = {f"{programs} programs": with_programs(programs) for programs in PROGRAMS}
        measure(setting, "kernel", moves, True, KiB=kib)


def bulk(setting: Setting) -> None:
    if setting.kernels.wait() is not None:
        setting.results.add("bulk", skipped=setting.kernels.missing)
        return
    for kib in STRETCHES_KIB:
        pages = _stretches(setting, kib)
        moves = {
            f"bulk, {name}": pages.compiled(setting.kernels, "bulk", settings)
            for name, settings in BULK.items()
        }
        moves["loads and stores"] = pages.compiled(setting.kernels, "plain", PLAIN_GROUPS)
        measure(setting, "bulk", moves, True, KiB=kib)


def beside(setting: Setting) -> None:
    """Copies beside the loop, each way, as long as most of it."""
    ends, results = setting.ends, setting.results
    pages = Pages.stretches(ends, 128 * KIB, setting.size_bytes)
    with_programs = pages.kernel()
    moves = {
        "plain": plain(ends.device, ends.host[: len(ends.device)], ends.streams[0]),
        "pieces, 1 stream": pages.batches(1, 64),
        "kernel, 2 programs": with_programs(2),
        "kernel, 4 programs": with_programs(4),
    }
    if setting.kernels.wait() is None:
        moves["bulk, wide"] = pages.compiled(setting.kernels, "bulk", BULK["wide"])
    else:
        results.add("beside", skipped=f"bulk: {setting.kernels.missing}")
    for name, move in moves.items():
        if move.equal() != "equal":
            raise RuntimeError(f"{name}: bytes differ")
    products, taken = Products(), Results()

    def nothing() -> list[Any]:
        time.sleep(0.08)
        return []

    rounds = max(1, setting.rounds - 2)
    products.measure(taken, {"none": nothing}, 0, rounds)
    copies = {
        f"{name}, {COLUMNS[verb]}": move.copies(verb, BESIDE_TIMES)
        for name, move in moves.items()
        for verb in VERBS
    }
    products.measure(taken, copies, BESIDE_TIMES * setting.size_bytes, rounds)
    for row in taken.rows["interference"]:
        results.add("beside", **row)


PARTS: dict[str, tuple[Callable[[Setting], None], str, str]] = {
    "plain": (plain_copies, "Plain copies", "Registered memory; the call doesn't wait."),
    "pieces": (
        pieces,
        "Pieces at random addresses, by copy engine",
        "Batches of one-dimensional copies; `call_ms` is the calling thread's time.",
    ),
    "rows": (
        rows,
        "Rows at random addresses, by copy engine",
        "Batches of two-dimensional copies of 64 rows, so far apart in the host and adjacent on "
        "the device.",
    ),
    "kernel": (
        kernel,
        "The kernel alone",
        "The package's, between two events; a program takes one multiprocessor. One launch.",
    ),
    "bulk": (
        bulk,
        "Bulk asynchronous copies",
        "`gpu_link.cu`, between two events. Wide: rings of 192 KiB of shared memory, 2 thread "
        "groups of one warp. Slim: of 12 KiB, 8 groups out and 16 back. Ordinary loads and stores "
        "of 16 bytes a thread: 4 groups of 1024 threads.",
    ),
    "beside": (
        beside,
        "A loop of bfloat16 products beside copies",
        "Pieces of 128 KiB, four times over. The loss counts for the time that the copies took; "
        "`none` shows how far the loop's own time varies.",
    ),
}
OTHER_WAYS = """## Other ways tried

[gpu_link_ways.md](gpu_link_ways.md) has what they reached, and why the package goes as it does.
"""


def table(found: list[Row]) -> list[str]:
    """In Markdown; a column that only some rows have is empty in others."""
    columns = list(dict.fromkeys(name for row in found for name in row))
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    for row in found:
        shown = ("" if row.get(name) is None else str(row[name]) for name in columns)
        lines.append("| " + " | ".join(" ".join(text.split()) for text in shown) + " |")
    return lines


def report(results: Results, about: Row) -> str:
    lines = ["# What one GPU's link does with pieces of memory", ""]
    lines += ["The readings behind the limits in `hicache_storage/pools/strategy.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    for part, found in results.rows.items():
        _, title, note = PARTS[part]
        lines += ["", f"## {title}", "", note, "", *table(found)]
    return "\n".join(lines) + "\n\n" + OTHER_WAYS


def failures(results: Results) -> list[str]:
    """What went wrong, a line a row."""
    return [
        f"{part}: {row}"
        for part, found in results.rows.items()
        for row in found
        if row.get("bytes") == "DIFFER" or "error" in row
    ]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--results", default=str(REPOSITORY / "benchmarks" / "results"))
    parser.add_argument("--mib", type=int, default=1024, help="moved at most; half by kernels")
    parser.add_argument("--rounds", type=int, default=5, help="two fewer beside products")
    given = parser.parse_args()
    given.parts = given.parts.split(",")
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if given.mib < 16 or given.rounds < 1:
        parser.error("--mib must be at least 16, a page of the largest rows, and --rounds 1")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    return given


def main() -> None:
    began, options = time.perf_counter(), parsed()
    torch.manual_seed(1)
    results, about = Results(), machine()
    print(json.dumps(about), flush=True)
    directory = Path(options.results)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-link-") as built:
        kernels = Compiled(Path(built))
        size = options.mib << 20
        setting = Setting(results, Ends(size), kernels, options.rounds, size)
        for part in options.parts:
            try:
                PARTS[part][0](setting)
            except Exception as error:
                traceback.print_exc()
                results.add(part, error=f"{error!r:.300}")
            about["seconds"] = round(time.perf_counter() - began, 1)
            print(f"{part} done after {about['seconds']} s", flush=True)
            everything = {"about": about, "results": results.rows}
            (directory / "gpu_link.json").write_text(json.dumps(everything, indent=1))
            (directory / "gpu_link.md").write_text(report(results, about))
        kernels.wait()
    wrong = failures(results)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    gc.freeze()  # what is imported stays: collections before each timing are short
    main()
