"""Runs it: see the package."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .demands import of_one_gpu, of_two_gpus
from .one_gpu import EAGLE3_RELEASE, OneGPU
from .report import RESULTS, about, write
from .run import OutOfTime, Run
from .server import LAUNCHER
from .stores import BUILT_IN, OURS, STORES
from .two_gpus import TwoGPUs

REPORT_S = 12.0
"""What stopping the servers and the report take."""
REHEARSAL = (str(Path(__file__).with_name("rehearsal.py")),)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every demand is met."""
    options = parse(sys.argv[1:] if argv is None else argv)
    name = f"sglang_server_{options.release}" + ("_two_gpus" if options.ranks > 1 else "")
    name += "_rehearsed" if options.rehearse else ""
    options.results.mkdir(parents=True, exist_ok=True)
    stores = [store for store in STORES if store in options.stores]
    ours = [store for store in stores if store != BUILT_IN]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="sglang-server-"))
    run = Run(
        options.release,
        folder,
        options.results / f"{name}.jsonl",
        seconds=options.seconds,
        launcher=REHEARSAL if options.rehearse else LAUNCHER,
    )
    _end_in_time(run, options.seconds)
    facts = about(_command(options), _release(options), options.ranks)
    demands = []
    try:
        run.add("about", **facts)
        plan = TwoGPUs(run, ours) if options.ranks > 1 else OneGPU(
            run, stores, options.pair, options.rounds
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt, OutOfTime):
            plan.measure()
    finally:
        run.close()
        if options.ranks > 1:
            demands = of_two_gpus(run.rows, ours)
        else:
            eagle3 = options.release == EAGLE3_RELEASE or bool(options.pair)
            demands = of_one_gpu(run.rows, ours, eagle3=eagle3)
        path = write(name, facts, demands, run.rows, options.results)
        print(path.read_text(), flush=True)
    return 0 if all(demand.met for demand in demands) else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sglang_server",
        description="Accept length and time to first token of a real SGLang server with each "
        "store, before and after a restart.",
    )
    parser.add_argument("--release", required=True, help="of SGLang; for the report's name")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="GPUs")
    parser.add_argument(
        "--stores", nargs="+", choices=STORES, default=list(STORES), help="to compare"
    )
    parser.add_argument(
        "--pair", nargs="*", type=Path, default=[], help="pairs of train_eagle3, for EAGLE3 too"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of times to first token")
    parser.add_argument("--seconds", type=float, default=560.0, help="time for all of it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the report")
    parser.add_argument("--folder", type=Path, help="for models, stores and logs; else a new one")
    parser.add_argument("--rehearse", action="store_true", help="with stand-ins for servers")
    options = parser.parse_args(argv)
    if not set(options.stores) & set(OURS):
        parser.error(f"--stores needs one of {', '.join(OURS)}")
    return options


def _end_in_time(run: Run, seconds: float) -> None:
    """Has the report written in time, whatever a server does or who ends this process."""

    def end(number: int, _frame: object) -> None:
        run.add("failure", what="the run", why=f"ended by {signal.Signals(number).name}")
        run.close()  # so that nothing waits for an answer
        raise OutOfTime

    for one in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(one, end)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds - REPORT_S))


def _command(options: argparse.Namespace) -> str:
    """How to run it again, without this machine's folders."""
    found = ["python", "-m", "benchmarks.sglang_server", "--release", options.release]
    if options.ranks > 1:
        found += ["--ranks", str(options.ranks)]
    if set(options.stores) != set(STORES):
        found += ["--stores", *options.stores]
    if options.pair:
        found += ["--pair", *(path.name for path in options.pair)]
    return shlex.join([*found, "--rounds", str(options.rounds)])


def _release(options: argparse.Namespace) -> str:
    """What is installed: the report must not say another release than that."""
    if options.rehearse:
        return f"{options.release} (rehearsed without a server)"
    found = importlib.metadata.version("sglang")
    if found != options.release:
        raise SystemExit(f"--release {options.release}, but SGLang {found} is installed")
    return found


if __name__ == "__main__":
    sys.exit(main())
