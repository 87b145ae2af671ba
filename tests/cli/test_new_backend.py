"""`hicache-storage new-backend`: the package that it writes is right from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.prefix import Ran

Run = Callable[..., Ran]
BAD_NAMES = ["Mine", "my_store", "../x", "a/b", "2nd", "x-", "a--b", "a b", "", "é", "x" * 31]


def python(*arguments: object, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture
def installed(run: Run, tmp_path: Path) -> Path:
    """A package as it was written, installed into its folder `site`."""
    package = tmp_path / "made" / "package"
    ran = run("new-backend", "my-store.2", "--dir", package)
    assert ran.status == 0, ran.err
    python(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--no-index", "--target", package / "site", "."),
        cwd=package,
        path=package,
    )
    return package


def test_the_package_installs_and_passes_the_kit(installed: Path) -> None:
    site = installed / "site"
    listed = python("-m", "hicache_storage", "list", "my-store.2", cwd=installed, path=site)
    assert "my-store.2  ok      shared  hicache-storage-my-store-2 0.1.0" in listed.stdout
    tested = python("-m", "pytest", "-p", "no:cacheprovider", cwd=installed, path=site)
    summary = next(line for line in tested.stdout.splitlines() if "TestMyStore2: " in line)
    assert "0 failed, 0 deviate as declared" in summary
    assert int(summary.split("TestMyStore2: ")[1].split()[0]) > 40
    assert not list(installed.rglob(".new-*"))


@pytest.mark.parametrize("name", ["a", "x2.y3-z4", "m" * 30])
def test_the_package_is_in_good_style_whatever_its_name(
    run: Run, tmp_path: Path, name: str
) -> None:
    package = tmp_path / "package"
    assert run("new-backend", name, "--dir", package).status == 0
    config = Path(__file__).parents[2] / "pyproject.toml"
    for command in (["check"], ["format", "--check"]):
        python("-m", "ruff", *command, "--config", config, package, cwd=tmp_path, path=tmp_path)


def test_without_a_directory_it_is_named_after_the_package(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("new-backend", "mine").status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["hicache-storage-mine"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_can_not_be_used_is_refused_and_nothing_is_written(
    run: Run, tmp_path: Path, name: str
) -> None:
    ran = run("new-backend", "--dir", tmp_path / "package", "--", name)
    assert ran.status == 2
    assert f"{name!r} can't be the name of a backend" in ran.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "s3", "tier", "redis", "fsspec"])
def test_a_name_that_is_taken_is_refused_with_its_owner(
    run: Run, tmp_path: Path, name: str
) -> None:
    ran = run("new-backend", name, "--dir", tmp_path / "package")
    assert ran.status == 2
    assert f"backend {name!r} is offered by hicache-storage" in ran.err


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_what_exists_is_left_alone(run: Run, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "package"
    if kind == "directory":
        place.mkdir()
    elif kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path / "nowhere")
    ran = run("new-backend", "mine", "--dir", place)
    assert ran.status == 2
    assert "exists; name another directory with --dir" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_a_place_that_can_not_be_written_is_one_clear_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run("new-backend", "mine", "--dir", tmp_path / "file" / "package")
    assert ran.status == 2
    assert "package can't be written: " in ran.err
