"""Packages on disk, as an installer leaves them: metadata, entry points and modules."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

GROUP = "hicache_storage.backends"

GOOD = """
    from hicache_storage.backends.memory import MemoryBackend

    class Backend(MemoryBackend):
        pass
"""
"""Source of a module whose `Backend` works."""


def install(
    site: Path,
    name: str,
    backends: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "1.0",
    entry_points: bool = True,
) -> None:
    """Puts a distribution into the directory `site`, which belongs on sys.path.

    `backends` maps names to "module:Class", `modules` module names to their source. Without
    `entry_points` its metadata names none, as that of an install from before there were any.
    """
    site.mkdir(parents=True, exist_ok=True)
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        lines = [f"{backend} = {value}" for backend, value in backends.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    for module, source in (modules or {}).items():
        (site / f"{module}.py").write_text(textwrap.dedent(source))
