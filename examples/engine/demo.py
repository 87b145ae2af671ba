"""What losing the draft's KV pages costs, shown on real storage in separate processes.

    python examples/engine/demo.py
    python examples/engine/demo.py --prompt FILE --store s3://bucket/prefix --pair mla --json

A small target model with an EAGLE-style draft head continues a text. Its KV pages go to a store, in
pairs, and come back from there in a new process:

    cold        nothing is stored: the prompt is computed, its pages are written
    restored    a new process gets the target's and the draft's pages from storage
    draft lost  the draft's pages were deleted from the store; the target's are all there
    required    pairs are written again, then two draft pages deleted; with pairing "required" a
                hit ends before the first page without its draft, and the rest is computed

The output is the same each time, since the target checks every guess; how many guesses it
accepts a step, and so the speed, is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
MISSING = [
    name
    for name in ("hicache_storage", "torch", "safetensors", "tokenizers")
    if importlib.util.find_spec(name) is None
]
if MISSING:
    sys.exit(
        f"demo: {', '.join(MISSING)} not found; in the repository's folder: "
        "pip install -e '.[engine]'"
    )

from processes import SIGNALS, StageFailed, signals_put_off  # noqa: E402
from progress import Progress  # noqa: E402
from report import as_json, for_people, shown_url  # noqa: E402
from settings import StageSettings  # noqa: E402
from stages import DemoError, Stages  # noqa: E402

from hicache_storage import HiCacheStorageError  # noqa: E402


def check_prompt(path: Path) -> None:
    """Refuse what is no text file with a text in it."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DemoError(f"can't read the prompt {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DemoError(f"the prompt {path} is not a UTF-8 text file ({error.reason})") from error
    if "\0" in text:
        raise DemoError(f"the prompt {path} is a binary file; give a text file")
    if not text.strip():
        raise DemoError(f"the prompt {path} is empty; give a text of a thousand words or so")


def at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` on."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, got {text!r}"
            )
        return value

    return number


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompt", type=Path, help="a text file (default: one of prompts/)")
    add("--store", metavar="URL", help="where pages go, and stay (default: a temporary folder)")
    add("--pair", choices=("mha", "mla"), default="mha", help="the target's kind of attention")
    add("--layout", choices=("page_first", "layer_first", "page_first_direct"),
        default="page_first", help="the host pools' layout")  # fmt: skip
    add("--prompt-tokens", type=at_least(1), default=1100, help="cut the text to so many tokens")
    add("--new-tokens", type=at_least(2), default=200, help="tokens to generate")
    add("--page-size", type=at_least(1), default=64, help="tokens in a page")
    add("--tenant", help="salt of the pages' namespace (default: a new one, so that cold is cold)")
    add("--device", default="cpu", help="cpu or cuda")
    add(
        "--threads",
        type=at_least(1),
        default=1,
        help="torch threads; 1 is quickest for such models",
    )
    add("--checkpoints", type=Path, default=HERE / "checkpoints", help="folder of the pairs")
    add("--json", action="store_true", help="print the figures as one JSON object")
    add("--verbose", action="store_true", help="show what the processes log")
    return parser.parse_args(arguments)


def settings_from(options: argparse.Namespace, store: str) -> StageSettings:
    """What every stage shares."""
    prompt = options.prompt
    if prompt is None:
        prompt = HERE / "prompts" / ("caches.txt" if options.pair == "mha" else "harbour.txt")
    check_prompt(prompt)
    checkpoint = options.checkpoints / options.pair
    if not (checkpoint / "config.json").is_file():
        raise DemoError(f"no checkpoint in {checkpoint}; train.py makes one")
    return StageSettings(
        store=store,
        prompt=str(prompt.resolve()),
        checkpoint=str(checkpoint.resolve()),
        pair=options.pair,
        layout=options.layout,
        tenant=f"demo-{secrets.token_hex(6)}" if options.tenant is None else options.tenant,
        pairing="best_effort",
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        page_size=options.page_size,
        device=options.device,
        threads=options.threads,
    )


def stopped(_signal: int, _frame: object) -> NoReturn:
    """End as after Ctrl-C: with everything cleaned up."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all ran and every output was equal; 1: it could not run, or one differed."""
    options = parse(arguments)
    for number in SIGNALS[1:]:
        signal.signal(number, stopped)
    progress = Progress()
    try:
        with ExitStack() as cleanup:
            store = options.store
            if store is None:
                with signals_put_off():
                    folder = cleanup.enter_context(
                        tempfile.TemporaryDirectory(prefix="hicache-demo-")
                    )
                store = f"file://{folder}"
            stages = Stages(settings_from(options, store), progress, verbose=options.verbose)
            stages.run()
        if options.json:
            print(json.dumps(as_json(stages), indent=2), flush=True)
        else:
            progress.note("")
            print(for_people(stages), flush=True)
        if options.store is not None:
            progress.note(
                f"pages are left in {shown_url(store)}, tenant {stages.settings.tenant!r}"
            )
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on
        return 1
    except KeyboardInterrupt:
        progress.drop()
        print("demo: stopped", file=sys.stderr)
        return 130
    except (DemoError, StageFailed, HiCacheStorageError) as error:
        progress.drop()
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if not all(result["output_equal"] for result in stages.results.values()):
        print("demo: an output differs from the cold run's, which must not be", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
