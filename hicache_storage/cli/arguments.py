"""The command line. Commands are imported only when they run, so that --help is fast."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from .. import __version__
from ..config import ENVIRONMENT_PREFIX
from .output import Answer

URL_HELP = f"store URL, e.g. file:///var/cache/kv; default: {ENVIRONMENT_PREFIX}URL"
EPILOG = """exit status: 0 all is well; 1 something wrong was found; 2 wrong usage or configuration;
3 the store failed or can't be opened"""


def _deferred(module: str, function: str) -> Callable[[argparse.Namespace], Answer]:
    def run(arguments: argparse.Namespace) -> Answer:
        command = getattr(importlib.import_module(f"{__package__}.{module}"), function)
        answer: Answer = command(arguments)
        return answer

    return run


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="hicache-storage",
        description="Look at, check and clean stores of KV-cache pages.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"hicache-storage {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="answer as JSON")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add(name: str, module: str, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=summary, description=summary, parents=[common], epilog=EPILOG
        )
        function = f"run_{name.replace('-', '_')}"
        command.set_defaults(run=_deferred(module, function))
        return command

    add("list", "listing", "the backends that are installed, and their options").add_argument(
        "backend", nargs="?", help="only this one"
    )
    _add_check(add("check", "checking", "run the conformance kit on a store"))
    _add_url(add("stat", "survey", "what a store holds: namespaces, pages, pairs"))
    _add_explain(add("explain", "explaining", "why a prefix is, or is not, read from a store"))
    verify = add("verify", "verifying", "read and check every page of a store")
    _add_url(verify)
    _add_selection(verify)
    verify.add_argument("--delete-bad", action="store_true", help="delete pages proven bad")
    _add_clean(add("clean", "cleaning", "delete pages; only says what it would do without --yes"))
    new_backend = add("new-backend", "new_backend", "write a plugin package that passes the kit")
    new_backend.add_argument("name", help="the scheme of its URLs, e.g. mystore")
    new_backend.add_argument(
        "--dir", help="the directory to make (default: ./hicache-storage-NAME); must not exist"
    )
    doctor = add("doctor", "doctor", "look for what is wrong with the installation")
    doctor.add_argument("url", nargs="?", help=f"also try this store. {URL_HELP}")
    doctor.add_argument(
        "--sglang",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENT",
        help="also check SGLang's installation and, given all the arguments that a server is "
        "started with, whether that server will use its store; stands last",
    )
    return parser


def _add_url(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", nargs="?", help=URL_HELP)


def _add_selection(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="DIGEST",
        help="only this namespace (the beginning of its digest); may be repeated",
    )
    command.add_argument("--model", help="only namespaces of this model")


def _add_check(command: argparse.ArgumentParser) -> None:
    _add_url(command)
    command.add_argument(
        "--report", choices=("text", "markdown", "json"), default="text", help="form of the report"
    )
    command.add_argument("--output", metavar="FILE", help="write the report to a file as well")
    command.add_argument(
        "--clause", action="append", default=[], metavar="N", help="only this clause or section"
    )
    command.add_argument(
        "--deviation",
        action="append",
        default=[],
        metavar="N=REASON",
        help="a clause that the backend knowingly breaks; may be repeated",
    )
    command.add_argument(
        "--destructive",
        action="store_true",
        help="the store may be filled up and cleared: also try the clauses that do that",
    )
    command.add_argument(
        "--timeout-s", type=float, default=120.0, help="limit for each clause (default 120)"
    )


def _add_explain(command: argparse.ArgumentParser) -> None:
    _add_url(command)
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--hashes", nargs="+", metavar="HASH", help="page hashes, or @FILE")
    which.add_argument(
        "--tokens", metavar="FILE", help="token ids: JSON list or numbers, - for standard input"
    )
    command.add_argument("--page-size", type=int, help="tokens in a page, with --tokens")
    command.add_argument(
        "--mode", choices=("tokens", "pairs"), help="how pages are hashed, with --tokens"
    )
    _add_selection(command)
    command.add_argument("--tenant", help="only namespaces of this tenant")
    command.add_argument(
        "--pairing",
        choices=("best_effort", "required", "off"),
        default="best_effort",
        help="whether the engine needs draft pages (default best_effort)",
    )
    command.add_argument(
        "--threshold-pages",
        type=int,
        default=0,
        help="shortest run that the engine prefetches, in pages",
    )


def _add_clean(command: argparse.ArgumentParser) -> None:
    _add_url(command)
    _add_selection(command)
    command.add_argument("--older-than", metavar="AGE", help="unused for longer: 36h, 7d, 2w")
    command.add_argument(
        "--orphan-drafts", action="store_true", help="draft pages without their target"
    )
    command.add_argument("--all", action="store_true", help="every page of every namespace")
    command.add_argument("--yes", action="store_true", help="really delete")


def option_pairs(given: list[str], flag: str) -> dict[str, Any]:
    """ "N=REASON" arguments as a dict; raises ConfigError for one without "="."""
    from ..errors import ConfigError

    pairs = {}
    for one in given:
        name, sign, value = one.partition("=")
        if not sign or not value.strip():
            raise ConfigError(f"{flag} {one!r}: write {flag} 8.3='the reason'")
        pairs[name.strip()] = value.strip()
    return pairs
