"""`hicache-storage doctor`: what is wrong with this installation, and with a store."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import uuid
from collections import defaultdict
from importlib import metadata
from typing import Any

from .. import __version__
from ..adapters.sglang_options import AdapterConfig
from ..config import ENVIRONMENT_PREFIX, describe_options, environment_url
from ..discovery import EXTRAS, find_backends
from ..errors import HiCacheStorageError
from ..middleware.stack import INNERMOST_FIRST
from ..opening import open_store
from ..testing.bench import kit_namespace
from .doctor_sglang import sglang_checks
from .listing import describe, is_installed, reason_of
from .output import Answer, table
from .stores import shown_url

TRIAL_PAGES = 8
TRIAL_BYTES = 1 << 20


def run_doctor(arguments: argparse.Namespace) -> Answer:
    """Every line is ok, a note, or wrong; exit status 1 if anything is wrong."""
    checks = [
        *_versions(),
        *_distributions(),
        *_backends(),
        *_environment(),
    ]
    url = arguments.url or environment_url()
    if url is not None:
        checks += _try_store(shown_url(url), url)
    if arguments.sglang is not None:
        found, options = sglang_checks(arguments.sglang)
        checks += found
        if options is not None:
            checks += _try_store(f"of SGLang: {options.backend}", options.url, **options.overrides)
    wrong = [check for check in checks if check["state"] == "wrong"]
    rows = [(check["state"], check["what"], check["found"]) for check in checks]
    summary = "nothing is wrong" if not wrong else f"{len(wrong)} wrong"
    text = table(("", "what", "found"), rows) + f"\n\n{summary}"
    return Answer(not wrong, {"checks": checks, "good": not wrong}, text)


def _check(state: str, what: str, found: str) -> dict[str, Any]:
    return {"state": state, "what": what, "found": found}


def _versions() -> list[dict[str, Any]]:
    checks = [
        _check("ok", "hicache-storage", __version__),
        _check("ok", "python", f"{platform.python_version()} on {platform.platform()}"),
    ]
    checks += [_check("ok", name, metadata.version(name)) for name in ("pluggy", "xxhash")]
    clients = {**EXTRAS, "torch": "torch", "metrics": "prometheus_client", "sglang": "sglang"}
    for extra, module in sorted(clients.items()):
        present = is_installed(module)
        found = f"{module} is installed" if present else f"{module} is not installed"
        checks.append(_check("ok" if present else "note", f"extra {extra}", found))
    return checks


def _distributions() -> list[dict[str, Any]]:
    """Packages that are on the path twice: the first hides the entry points of the second."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] if distribution.metadata else None
        if name and re.match(r"(?i)(hicache|sglang|pluggy)", name):
            where = str(getattr(distribution, "_path", distribution))
            place = os.path.realpath(where)
            places[re.sub(r"[-_.]+", "-", name).lower()].setdefault(place, distribution.version)
    checks = []
    for name, found in sorted(places.items()):
        if len(found) > 1:
            listing = "; ".join(f"{version} at {place}" for place, version in found.items())
            checks.append(
                _check(
                    "wrong",
                    f"package {name}",
                    f"installed {len(found)} times, the first hides the others: {listing}. "
                    "Uninstall it until it is gone, then install it once",
                )
            )
    return checks


def _backends() -> list[dict[str, Any]]:
    found = find_backends()
    checks = []
    for one in found.values():
        entry = describe(one, found)
        state = {"ok": "ok", "not installed": "note"}.get(entry["status"], "wrong")
        text = f"{one.distribution} {one.version}"
        reason = f": {entry['reason']}" if entry["reason"] else ""
        checks.append(_check(state, f"backend {one.name}", text + reason))
    if not found:
        checks.append(
            _check("wrong", "backends", "none, not even the built-in ones: reinstall the package")
        )
    return checks


def _environment() -> list[dict[str, Any]]:
    """Variables that nothing will read, since no backend has that option."""
    found = find_backends()
    known = {f"{ENVIRONMENT_PREFIX}URL"}
    for one in found.values():
        for option in describe(one, found)["options"]:
            variable = f"{ENVIRONMENT_PREFIX}{one.name}_{option['name']}"
            known.add(variable.upper().replace("-", "_"))
    configs = {name: cls.Config for name, cls in INNERMOST_FIRST.items()}
    for name, config in {**configs, "sglang": AdapterConfig}.items():
        options = describe_options(config)
        known |= {f"{ENVIRONMENT_PREFIX}{name}_{option['name']}".upper() for option in options}
    checks = []
    for variable in sorted(os.environ):
        if variable.startswith(ENVIRONMENT_PREFIX):
            state = "ok" if variable in known else "wrong"
            found_text = "set" if variable in known else "set, but no backend has such an option"
            checks.append(_check(state, variable, found_text))
    return checks


def _try_store(shown: str, url: str | dict[str, Any], **overrides: Any) -> list[dict[str, Any]]:
    """Opens the store, and stores, reads and deletes a few pages in a namespace of its own."""
    what = f"store {shown}"
    try:
        with open_store(url, **overrides) as store:
            namespace = kit_namespace(TRIAL_BYTES, uuid.uuid4().hex)
            keys = [
                hashlib.sha256(f"{namespace.tenant} {i}".encode()).hexdigest()
                for i in range(TRIAL_PAGES)
            ]
            pages = [os.urandom(TRIAL_BYTES) for _ in keys]
            stored = store.batch_set(namespace, keys, pages)
            buffers = [bytearray(TRIAL_BYTES) for _ in keys]
            hits = store.batch_get(namespace, keys, buffers)
            right = sum(
                hit and buffer == page
                for hit, buffer, page in zip(hits, buffers, pages, strict=True)
            )
            if "delete" in store.capabilities:
                store.delete(namespace, [*keys, f"n:{namespace.digest}"])
            name = store.name
    except HiCacheStorageError as error:
        return [_check("wrong", what, reason_of(error))]
    counts = f"{sum(stored)} of {TRIAL_PAGES} trial pages stored, {right} read back"
    state = "ok" if sum(stored) == right == TRIAL_PAGES else "wrong"
    return [_check(state, what, f"backend {name}: {counts}")]
