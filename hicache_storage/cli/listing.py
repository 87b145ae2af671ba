"""`hicache-storage list`: every backend by name, whether it can be loaded, and its options."""

from __future__ import annotations

import argparse
import importlib.util
import traceback
from typing import Any

from ..config import describe_options
from ..discovery import EXTRAS, Found, find_backends, load_backend, missing_extra
from ..errors import HiCacheStorageError, UnknownBackendError
from .output import Answer, table


def run_list(arguments: argparse.Namespace) -> Answer:
    """Loads each backend's class, and opens none."""
    found = find_backends()
    if arguments.backend is not None:
        if arguments.backend not in found:
            load_backend(arguments.backend, found)  # raises, with what is known
            raise UnknownBackendError(arguments.backend)
        found = {arguments.backend: found[arguments.backend]}
    entries = [describe(one, found) for one in found.values()]
    good = all(entry["status"] in ("ok", "not installed") for entry in entries)
    return Answer(good, {"backends": entries}, _as_text(entries))


def describe(found: Found, everything: dict[str, Found]) -> dict[str, Any]:
    """One backend. Whatever its import raises, also SystemExit, is its status and goes no
    further."""
    entry: dict[str, Any] = {
        "name": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "class": found.entry_point.value,
        "status": "ok",
        "reason": "",
        "scope": None,
        "options": [],
    }
    client = EXTRAS.get(found.name)
    if found.built_in and client is not None and not is_installed(client):
        entry["status"] = "not installed"
        entry["reason"] = missing_extra(found.name, ModuleNotFoundError(name=client))
        return entry
    try:
        cls = load_backend(found.name, everything)
        entry["scope"] = getattr(cls, "scope", "shared")
        entry["options"] = describe_options(getattr(cls, "Config", None))
    except BaseException as error:
        entry["status"] = "duplicate" if found.rivals and not found.built_in else "broken"
        entry["reason"] = reason_of(error)
    if found.rivals and found.built_in:
        entry["reason"] = f"also offered by {', '.join(found.rivals)}, which is not used"
    return entry


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found; imports nothing."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is in sys.modules and was put there to block it
        return False


def reason_of(error: BaseException) -> str:
    """One line about an error, with the place it comes from if it isn't this package's own."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, HiCacheStorageError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def _as_text(entries: list[dict[str, Any]]) -> str:
    if not entries:
        return "no backend is installed"
    rows = [
        (e["name"], e["status"], e["scope"] or "", f"{e['distribution']} {e['version']}")
        for e in entries
    ]
    lines = [table(("backend", "status", "scope", "package"), rows)]
    for entry in entries:
        if entry["reason"]:
            lines.append(f"\n{entry['name']}: {entry['reason']}")
        if entry["options"]:
            rows = [(f"  {o['name']}", _kind(o), _default(o), o["doc"]) for o in entry["options"]]
            title = f"\noptions of {entry['name']}://"
            lines.append(title + "\n" + table(("  option", "type", "default", ""), rows))
    return "\n".join(lines)


def _kind(option: dict[str, Any]) -> str:
    kind = option["type"].replace(" | None", "").removeprefix("typing.")
    return f"{kind} ({option['unit']})" if option["unit"] else str(kind)


def _default(option: dict[str, Any]) -> str:
    if option["required"]:
        return "(required)"
    return "" if option["default"] is None else str(option["default"])
