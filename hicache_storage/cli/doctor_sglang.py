"""`hicache-storage doctor --sglang`: will SGLang, started like this, use the store?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from ..adapters.sglang_names import ANY_NAME, MODULE, class_name
from ..adapters.sglang_options import Options, read_options
from ..discovery import find_backends
from ..errors import HiCacheStorageError
from .output import size
from .sglang_command import Launch, read_launch, token_bytes

Check = dict[str, Any]
OLDEST, NEWEST = (0, 5, 11), (0, 5, 23)
HALF_OF_HOST = (0, 5, 15)
"""From here on a prefetch may take half of the host pool, whatever the device pool."""
GROUP = "sglang.srt.plugins"
PLUGIN = "hicache_storage"
PARSE_S = 180
_ASK_SGLANG = """
import argparse, json
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = [a for a in parser._actions if "--hicache-storage-backend" in a.option_strings]
print("\\n" + json.dumps(list(flags[0].choices or ["*"])))
"""


def sglang_checks(command: Sequence[str]) -> tuple[list[Check], Options | None]:
    """Every check, and the store that the command names, if it names one that can be opened."""
    launch = read_launch(command)
    version, checks = _version()
    if version is not None:
        checks += _plugin()
        checks += _choices(launch)
    options, more = _options(launch)
    checks += more
    if command:
        checks += _cache(launch)
        checks += _prefetching(launch, version)
        checks += _memory(launch)
    return checks, options


def _check(state: str, what: str, found: str) -> Check:
    return {"state": state, "what": f"sglang: {what}", "found": found}


def _version() -> tuple[tuple[int, ...] | None, list[Check]]:
    try:
        text = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        found = "not installed in this environment; install hicache-storage where SGLang is"
        return None, [_check("wrong", "version", found)]
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
    if numbers < OLDEST:
        tested = ".".join(map(str, OLDEST))
        return numbers, [_check("wrong", "version", f"{text}; the oldest supported is {tested}")]
    if numbers > NEWEST:
        tested = ".".join(map(str, NEWEST))
        return numbers, [_check("note", "version", f"{text}, newer than {tested}, the last tested")]
    return numbers, [_check("ok", "version", text)]


def _plugin() -> list[Check]:
    found = [e for e in metadata.entry_points(group=GROUP) if e.name == PLUGIN]
    if not found:
        return [
            _check(
                "wrong",
                "plugin",
                f"no entry point {PLUGIN!r} in {GROUP!r}: install hicache-storage again",
            )
        ]
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name]
    if allowed and PLUGIN not in allowed:
        return [
            _check("wrong", "plugin", f"SGLANG_PLUGINS leaves it out; add {PLUGIN!r} to its list")
        ]
    return [_check("ok", "plugin", "SGLang will load it")]


def _choices(launch: Launch) -> list[Check]:
    """Asks SGLang's own parser, in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _ASK_SGLANG],
            capture_output=True,
            text=True,
            timeout=PARSE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [_check("note", "flag", f"SGLang's parser could not be asked: {error}")]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [_check("note", "flag", f"SGLang can't be imported here: {last}")]
    choices = json.loads(done.stdout.strip().splitlines()[-1])
    ours = [name for name in (*find_backends(), ANY_NAME) if name in choices]
    if "*" in choices:
        return [_check("ok", "flag", "--hicache-storage-backend takes any name")]
    if ANY_NAME not in choices:
        return [_check("wrong", "flag", f"only SGLang's own backends are choices: {choices}")]
    if launch.backend is not None and launch.backend not in choices:
        return [_check("wrong", "flag", f"{launch.backend!r} is none of the choices {choices}")]
    return [_check("ok", "flag", f"--hicache-storage-backend takes {', '.join(ours)}")]


def _options(launch: Launch) -> tuple[Options | None, list[Check]]:
    backend = launch.backend
    if backend is None:
        return None, []
    if backend == "dynamic":
        module = launch.extra_config.get("module_path")
        if module != MODULE:
            return None, [_check("note", "backend", f"module_path {module!r} is not {MODULE}")]
        names = {class_name(name): name for name in find_backends()}
        backend = names.get(str(launch.extra_config.get("class_name", "")), ANY_NAME)
    elif backend not in find_backends() and backend != ANY_NAME:
        return None, [_check("note", "backend", f"{backend!r} is not one of this package")]
    elif backend == "file":
        found = "SGLang's own; this package's is 'hicache_storage' with a url file:///..."
        return None, [_check("note", "backend", found)]
    try:
        options = read_options("" if backend == ANY_NAME else backend, launch.extra_config)
    except HiCacheStorageError as error:
        return None, [_check("wrong", "extra config", str(error))]
    checks = [_check("ok", "extra config", f"backend {options.backend}")]
    if not options.adapter.revision:
        checks.append(
            _check("note", "extra config", "no 'revision': weights are known by their name alone")
        )
    return options, checks


def _cache(launch: Launch) -> list[Check]:
    checks = []
    if not launch.hierarchical:
        found = "--enable-hierarchical-cache is missing: without it there is no storage"
        checks.append(_check("wrong", "cache", found))
    if launch.write_policy == "write_back":
        found = "write_back stores pages once the host pool evicts them, so later, or never"
        checks.append(_check("note", "cache", found))
    return checks


def _prefetching(launch: Launch, version: tuple[int, ...] | None) -> list[Check]:
    """What would keep stored pages from being read."""
    checks = []
    pages = -(-launch.threshold_tokens // launch.page_size)
    found = (
        f"stored prefixes of less than {launch.threshold_tokens} tokens ({pages} pages of "
        f"{launch.page_size}) are not read; 'prefetch_threshold' in the extra config"
    )
    checks.append(_check("note", "prefetch threshold", found))
    ratio = launch.ratio
    shared = version is not None and version < HALF_OF_HOST
    if shared and ratio is not None and not launch.size_gb and ratio <= 1:
        found = (
            f"zero: this release prefetches into what the host pool has more than the device pool, "
            f"and --hicache-ratio is {ratio:g}; 2 or more is usual"
        )
        checks.append(_check("wrong", "prefetch capacity", found))
    elif shared and launch.size_gb:
        found = "zero unless the host pool of --hicache-size is larger than the device pool"
        checks.append(_check("note", "prefetch capacity", found))
    return checks


def _memory(launch: Launch) -> list[Check]:
    """The host pools of all ranks on this machine, the draft's included, beside its memory."""
    if not launch.size_gb:
        return []
    target = token_bytes(launch.model_path, launch.kv_dtype, launch.tp_size)
    draft = 0
    what = f"{launch.tp_size} x {launch.size_gb} GB"
    if launch.algorithm and launch.draft_path and target:
        each = token_bytes(launch.draft_path, launch.kv_dtype, launch.tp_size)
        if each is not None:
            draft = launch.size_gb * 10**9 // target * each
            what += f" and {launch.tp_size} x {draft / 1e9:.1f} GB for the draft"
    needed = launch.tp_size * (launch.size_gb * 10**9 + draft)
    available = _available_bytes()
    if available is None:
        return [_check("note", "host memory", what)]
    state = "ok" if needed < available else "wrong"
    return [_check(state, "host memory", f"{what}, of {size(available)} available")]


def _available_bytes() -> int | None:
    try:
        from ..pools.memory import available_bytes
    except ImportError:
        return None
    return available_bytes()
