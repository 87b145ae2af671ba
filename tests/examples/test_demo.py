"""The demo: what it shows with the real pairs, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import demo
import processes
import pytest
from progress import Progress
from s3_servers import SECRET_KEY, Server, seaweedfs
from settings import StageSettings

from hicache_storage import open_store

__all__ = ["seaweedfs"]

ENGINE = Path(__file__).parents[2] / "examples" / "engine"
STAGES = ("cold", "restored", "draft_lost", "required")
LIMIT_S = 240


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start(*arguments: str | Path, **options) -> subprocess.Popen:
    command = [sys.executable, ENGINE / "demo.py", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def run(*arguments: str | Path, **options) -> tuple[int, str, str]:
    with start(*arguments, **options) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except BaseException:
            process.kill()
            raise
    return process.returncode, out, err


@pytest.fixture
def temporary(tmp_path: Path) -> dict[str, str]:
    """An environment in which temporary folders are made under `tmp_path`/temporary."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return os.environ | {"TMPDIR": str(folder)}


def left_in(environment: dict[str, str]) -> list[str]:
    return os.listdir(environment["TMPDIR"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "layout", "cold_at_least"), [("mha", "page_first", 7.0), ("mla", "layer_first", 6.5)]
)
def test_losing_the_draft_costs_accept_length_and_nothing_else_does(
    pair, layout, cold_at_least, temporary
):
    code, out, err = run("--pair", pair, "--layout", layout, "--json", env=temporary)
    assert code == 0, err
    figures = json.loads(out)
    cold, restored, lost, required = (figures[stage] for stage in STAGES)
    assert cold["prompt_tokens"] >= 1024
    assert cold["new_tokens"] == 200
    assert cold["accept_length"] >= cold_at_least
    assert (cold["storage_tokens"], cold["draft_hits"], cold["lost_drafts"]) == (0, 0, 0)

    pages = (cold["prompt_tokens"] - 1) // 64
    assert restored["accept_length"] >= 0.98 * cold["accept_length"]
    assert restored["storage_tokens"] >= cold["prompt_tokens"] - 2 * 64
    assert (restored["draft_hits"], restored["lost_drafts"]) == (pages, 0)

    assert lost["accept_length"] <= 2.5
    assert lost["storage_tokens"] == restored["storage_tokens"]
    assert (lost["draft_hits"], lost["lost_drafts"]) == (0, pages)

    assert required["accept_length"] >= 0.98 * cold["accept_length"]
    assert required["storage_tokens"] == pages // 2 * 64
    assert (required["draft_hits"], required["lost_drafts"]) == (pages // 2, 0)

    assert all(figures[stage]["output_equal"] is True for stage in STAGES)
    assert all(figures[stage]["time_to_first_token_s"] > 0 for stage in STAGES)
    assert all(figures[stage]["storage_errors"] == 0 for stage in STAGES)
    assert figures["settings"]["pair"] == pair
    assert figures["settings"]["layout"] == layout
    assert figures["machine"]["cpus"] == os.cpu_count()
    assert left_in(temporary) == []


@pytest.mark.slow
def test_a_person_sees_a_table_bars_and_progress(tmp_path):
    store = f"file://{tmp_path}/kv"
    code, out, err = run("--store", store, "--prompt-tokens", "300", "--new-tokens", "50")
    assert code == 0, err
    for heading in ("accept length", "from storage", "draft pages", "first token", "tokens/s"):
        assert heading in out
    table, _, bars = out.partition("of at most 8 tokens a step")
    for row in ("cold", "restored", "draft lost", "required"):
        assert f"\n{row} " in table
        assert f"\n{row} " in bars
    assert "█" in out or "#" in out
    assert "\x1b" not in err, "no terminal, no control characters"
    assert "draft lost: a new process, draft pages deleted ..." in err
    assert f"pages are left in {store}, tenant 'demo-" in err
    assert any(path.is_file() for path in (tmp_path / "kv").rglob("*"))


@pytest.mark.servers
@pytest.mark.slow
def test_it_runs_on_an_s3_server_and_shows_no_secret(seaweedfs: Server):
    url = seaweedfs.store_url()
    code, out, err = run("--store", url, "--prompt-tokens", "300", "--new-tokens", "50", "--json")
    assert code == 0, err
    figures = json.loads(out)
    assert [figures[stage]["storage_tokens"] for stage in STAGES] == [0, 256, 256, 128]
    assert figures["restored"]["accept_length"] == figures["cold"]["accept_length"]
    assert figures["draft_lost"]["lost_drafts"] == 4
    assert all(figures[stage]["output_equal"] for stage in STAGES)
    assert "key" not in figures["settings"]["store"]
    assert SECRET_KEY not in out + err


@pytest.mark.slow
def test_it_runs_on_lmdb(tmp_path):
    pytest.importorskip("lmdb")
    arguments = ("--store", f"lmdb://{tmp_path}/kv", "--prompt-tokens", "200", "--pair", "mla")
    code, out, err = run(*arguments, "--new-tokens", "20", "--json")
    assert code == 0, err
    figures = json.loads(out)
    assert [figures[stage]["storage_tokens"] for stage in STAGES] == [0, 192, 192, 64]
    assert all(figures[stage]["output_equal"] for stage in STAGES)


@pytest.mark.slow
def test_a_tenant_whose_pages_are_stored_already_is_not_cold(tmp_path):
    arguments = ("--store", f"file://{tmp_path}/kv", "--tenant", "me", "--prompt-tokens", "200")
    code, _, err = run(*arguments, "--new-tokens", "10")
    assert code == 0, err
    code, out, err = run(*arguments, "--new-tokens", "10")
    assert code == 1
    assert "so this run would not be cold; leave out --tenant" in err
    assert not out


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "No such file or directory"),
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\xff\xfe\x00", "is not a UTF-8 text file"),
        (b"ELF\x00\x01\x02", "is a binary file"),
    ],
)
def test_a_prompt_that_is_no_text_is_refused(contents, message, tmp_path, temporary):
    prompt = tmp_path / "prompt.txt"
    if contents is not None:
        prompt.write_bytes(contents)
    code, out, err = run("--prompt", prompt, env=temporary)
    assert (code, out) == (1, "")
    assert err.startswith("demo: ")
    assert message in err
    assert str(prompt) in err
    assert left_in(temporary) == []


def test_a_folder_is_no_prompt(tmp_path):
    code, _, err = run("--prompt", tmp_path)
    assert (code, err) == (1, f"demo: can't read the prompt {tmp_path}: Is a directory\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-tokens", "128"), "it needs more than two pages of 64 tokens"),
        (("--prompt-tokens", "2000", "--new-tokens", "2000"), "ask for less"),
        (("--device", "cuda:99"), "no CUDA device"),
    ],
)
def test_what_cant_be_served_is_refused_in_a_sentence(arguments, message, temporary):
    if "--device" in arguments:
        temporary = temporary | {"CUDA_VISIBLE_DEVICES": ""}
    code, out, err = run(*arguments, env=temporary)
    assert (code, out) == (1, "")
    assert message in err
    assert "Traceback" not in err
    assert left_in(temporary) == []


def test_a_short_text_is_refused(tmp_path):
    prompt = tmp_path / "short.txt"
    prompt.write_text("A short text.\n")
    code, _, err = run("--prompt", prompt)
    assert code == 1
    assert "it needs more than two pages of 64 tokens" in err


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://somewhere", "nosuch"),
        ("file", "URL"),
        ("memory://", "ends with the process"),
        ("file:///proc/nowhere/kv", "/proc/nowhere"),
    ],
)
def test_a_store_that_cant_serve_is_refused(url, message):
    code, out, err = run("--store", url)
    assert (code, out) == (1, "")
    assert "demo: " in err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("option", ["read_only=true", "capacity=100kB"])
def test_a_store_that_keeps_nothing_is_found_out_after_the_first_stage(option, tmp_path):
    folder = tmp_path / "kv"
    open_store(f"file://{folder}").close()
    arguments = ("--prompt-tokens", "200", "--new-tokens", "10", "--json")
    code, out, err = run("--store", f"file://{folder}?{option}", *arguments)
    assert (code, out) == (1, "")
    assert "is it read-only, full, or private to a process?" in err
    assert "Traceback" not in err


def test_a_missing_checkpoint_is_said(tmp_path):
    code, _, err = run("--checkpoints", tmp_path)
    assert (code, err) == (1, f"demo: no checkpoint in {tmp_path}/mha; train.py makes one\n")


@pytest.mark.parametrize("number", ["0", "-3", "many", "1"])
def test_numbers_are_checked(number):
    """One new token comes from the prompt alone: nothing would be guessed."""
    code, _, err = run("--new-tokens", number)
    assert code == 2
    assert "expected a whole number of at least 2" in err


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def signals_not_ignored() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and a child would inherit that."""
    before = {n: signal.signal(n, signal.default_int_handler) for n in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals_not_ignored")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for children in /proc")
@pytest.mark.parametrize("number", SIGNALS)
def test_when_stopped_it_ends_its_processes_and_removes_its_folder(number, temporary):
    with start(env=temporary) as process:
        try:
            until = time.monotonic() + LIMIT_S
            while not (children := children_of(process.pid)):
                assert time.monotonic() < until
                time.sleep(0.05)
            assert left_in(temporary) != []
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 130
    assert out == ""
    assert err.endswith("demo: stopped\n")
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert left_in(temporary) == []


@pytest.mark.usefixtures("signals_not_ignored")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_stop_while_a_process_is_being_started_ends_that_process_too(number, monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(number)

    monkeypatch.setattr(processes.subprocess, "Popen", Popen)
    signal.signal(number, demo.stopped)
    settings = StageSettings(
        "memory://", "", "", "mha", "page_first", "", "best_effort", 64, 8, 64, "cpu", 1
    )
    with pytest.raises(KeyboardInterrupt):
        processes.run_stage(settings, Progress(), verbose=False)
    assert len(started) == 1
    assert started[0].returncode is not None
    assert signal.getsignal(number) is demo.stopped


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_fault_of_the_demo(temporary):
    with start("--prompt-tokens", "200", "--new-tokens", "10", env=temporary) as process:
        try:
            process.stdout.close()
            err = process.stderr.read()
            process.wait(LIMIT_S)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert left_in(temporary) == []
