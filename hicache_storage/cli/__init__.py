"""The `hicache-storage` command: list, check, stat, explain, verify, clean, new-backend, doctor.

Exit status: 0 all is well; 1 the command worked and found something wrong (a clause fails, a
prefix isn't readable, a page is bad); 2 wrong usage or configuration; 3 the store failed or
can't be opened; 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from ..errors import ConfigError, HiCacheStorageError, InvalidKey
from .arguments import build_parser
from .output import Answer

FOUND_WRONG = 1
BAD_USAGE = 2
STORE_FAILED = 3
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        answer: Answer = arguments.run(arguments)
        print(json.dumps(answer.document, indent=2) if arguments.json else answer.text)
        sys.stdout.flush()
        return 0 if answer.good else FOUND_WRONG
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except (Exception, SystemExit) as error:
        # SystemExit comes from a plugin's import; the command's own is raised by the parser.
        if arguments.debug and isinstance(error, SystemExit):
            raise RuntimeError("a plugin wanted to end the process") from error
        if arguments.debug:
            raise
        wrong_usage = isinstance(error, (ConfigError, InvalidKey))
        name = "" if isinstance(error, HiCacheStorageError) else f"{type(error).__name__}: "
        more = "" if isinstance(error, HiCacheStorageError) else " (--debug shows the traceback)"
        text = " ".join(f"{name}{error}{more}".split())
        print(f"hicache-storage {arguments.command}: {text}", file=sys.stderr)
        return BAD_USAGE if wrong_usage else STORE_FAILED
