"""The benchmark of real SGLang servers: its models, its demands, and the whole run on stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hicache_storage import Namespace, open_store
from hicache_storage.keys import draft_key

ROOT = Path(__file__).parents[2]
HASHES = [f"{n:064x}" for n in range(4)]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`benchmarks.sglang_server` with its modules."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "engine"))
    import benchmarks.sglang_server.checkpoints
    import benchmarks.sglang_server.demands
    import benchmarks.sglang_server.pack
    import benchmarks.sglang_server.stores

    yield benchmarks.sglang_server
    for name in [name for name in sys.modules if name.startswith("benchmarks")]:
        monkeypatch.delitem(sys.modules, name)


def rehearse(results: Path, *arguments: str, fault: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sglang_server", "--release", "0.5.16", "--rehearse",
         "--rounds", "2", "--results", str(results), "--folder", str(results / "run"), *arguments],
        cwd=ROOT, env={**os.environ, "REHEARSAL_FAULT": fault, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    report = next(results.glob("*.md"), None)
    assert report is not None, done.stderr[-2000:]
    return done.returncode, report.read_text()


def unmet(report: str) -> list[str]:
    """The demands that aren't met, without those of times, which mean nothing here."""
    lines = [line for line in report.splitlines() if line.endswith(("**no** |", "measured |"))]
    return [line for line in lines if not line.startswith("| first token, ")]


@pytest.mark.slow
def test_a_run_on_one_gpu_meets_every_demand_if_the_servers_do(tmp_path: Path) -> None:
    _, report = rehearse(tmp_path, "--stores", "SGLang file", "file")
    assert unmet(report) == []
    assert "EAGLE3, the repository's: cold: accept length" in report
    rows = (tmp_path / "sglang_server_0.5.16_rehearsed.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["part"] == "about"
    assert not [row for row in rows if json.loads(row)["part"] == "failure"]


@pytest.mark.slow
def test_a_run_on_two_gpus_meets_every_demand_if_the_servers_do(tmp_path: Path) -> None:
    status, report = rehearse(tmp_path, "--ranks", "2", "--stores", "file", "lmdb")
    assert unmet(report) == []
    assert status == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"), [("no start: lmdb", "not measured"), ("forgets: lmdb", "**no**")]
)
def test_a_store_that_fails_is_told_and_leaves_the_others_alone(
    tmp_path: Path, fault: str, told: str
) -> None:
    status, report = rehearse(tmp_path, "--stores", "file", "lmdb", fault=fault)
    bad = [line for line in unmet(report) if "| lmdb |" in line or "EAGLE3" in line]
    assert status == 1
    assert any(told in line for line in bad)
    assert [line for line in unmet(report) if line not in bad] == [
        "| first token | file | at most 1 x SGLang file | - | not measured |"
    ]


def test_an_accept_length_below_the_demanded_share_is_not_met(package: ModuleType) -> None:
    def row(stage: str, accept: float) -> dict[str, Any]:
        return {"part": "accept", "pair": "STANDALONE, x", "store": "s3", "stage": stage,
                "accept_length": accept, "from_storage": 960, "same_text": True}  # fmt: skip

    def restarted(accept: float) -> bool | None:
        rows = [row("cold", 8.0), row("restarted", accept)]
        (found,) = [
            one
            for one in package.demands.of_one_gpu(rows, ["s3"], eagle3=False)
            if one.what == "restarted: accept length"
        ]
        return bool(found.met)

    assert restarted(7.84)
    assert not restarted(7.83)


def test_what_was_not_measured_is_not_met(package: ModuleType) -> None:
    for demands in (
        package.demands.of_one_gpu([], ["s3"], eagle3=True),
        package.demands.of_two_gpus([], ["s3"]),
    ):
        assert demands
        assert {one.met for one in demands} == {None}


def test_pages_of_one_rank_and_kind_are_deleted_and_no_others(
    package: ModuleType, tmp_path: Path
) -> None:
    place = package.stores.Shelf(tmp_path).place("file", "test")
    with open_store(place.options["url"]) as store:
        for rank in range(2):
            for kind in ("target", "draft"):
                namespace = Namespace(
                    model="m", pool="opaque", dtype="uint8", page_size=1, page_bytes=1, layers=1,
                    heads=1, head_dim=1, v_head_dim=0, order="opaque", revision=kind,
                    tp_rank=rank, tp_size=2,
                )  # fmt: skip
                keys = [draft_key(h) for h in HASHES] if kind == "draft" else HASHES
                store.batch_set(namespace, keys, [b"x"] * len(keys))
    chosen = set(HASHES[2:])
    assert package.stores.delete_pages(place, drafts=True, rank=1, hashes=chosen) == 2
    assert package.stores.count_pages(place) == {
        "draft 0/2": 4, "draft 1/2": 2, "target 0/2": 4, "target 1/2": 4,
    }  # fmt: skip
    assert package.stores.count_pages(place, chosen)["target 1/2"] == 2


def test_a_requirement_is_that_of_the_package_itself(package: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    required = ["openai-harmony==0.0.4", "openai==2.6.1", "transformers[torch] (>=5,<6)", "rich"]
    lines = "".join(f"Requires-Dist: {one}\n" for one in required)
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("x.dist-info/METADATA", f"Name: x\n{lines}Requires-Dist: a; extra == 'a'\n")
    found = package.pack.requirements(wheel, ("openai", "transformers", "rich", "a", "none"))
    assert found == ["openai==2.6.1", "transformers>=5,<6", "rich", "a"]


def test_widened_latent_attention_computes_the_same(package: ModuleType) -> None:
    from kv import NoCache
    from layers import LatentAttention, rotation

    sizes = {"rank": 24, "nope_dim": 16, "rope_dim": 8, "v_dim": 12}
    torch.manual_seed(0)
    ours = LatentAttention(32, 2, **sizes)
    for weight in (ours.k_up, ours.v_up, ours.norm.weight):
        torch.nn.init.normal_(weight)
    source = {f"attention.{name}": weight for name, weight in ours.state_dict().items()}
    source |= {"attention_norm.weight": torch.ones(32)}
    config = {"heads": 2, "kv_lora_rank": 24, "rope_dim": 8, "nope_dim": 16, "v_dim": 12}
    theirs = package.checkpoints._latent_layer(source, config)
    x, positions = torch.randn(9, 32), torch.arange(9)
    with torch.no_grad():
        want = ours(x, positions, rotation(positions, 8, 10_000.0), 0, NoCache())
        found = deepseek_attention(
            x, positions, {n.removeprefix("self_attn."): w for n, w in theirs.items()}, heads=2
        )
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def deepseek_attention(
    x: torch.Tensor, positions: torch.Tensor, weights: dict[str, torch.Tensor], heads: int
) -> torch.Tensor:
    """Attention as in DeepSeek-V2: 128 channels and 64 rotated ones a head, a latent of 512."""
    from layers import rotate, rotation

    by = rotation(positions, 64, 10_000.0)
    queries = (x @ weights["q_proj.weight"].T).view(len(x), heads, 192)
    q_nope, q_rope = queries.split((128, 64), dim=-1)
    latent, k_rope = (x @ weights["kv_a_proj_with_mqa.weight"].T).split((512, 64), dim=-1)
    latent = torch.nn.functional.rms_norm(
        latent, (512,), weights["kv_a_layernorm.weight"], 1e-5 * 24 / 512
    )
    k_nope, values = (
        (latent @ weights["kv_b_proj.weight"].T).view(len(x), heads, 256).split(128, dim=-1)
    )
    rotated = rotate(k_rope[:, None], by).expand(-1, heads, -1)
    q, k = torch.cat((q_nope, rotate(q_rope, by)), -1), torch.cat((k_nope, rotated), -1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), values.transpose(0, 1), is_causal=True,
        scale=192**-0.5,
    )  # fmt: skip
    return out.transpose(0, 1).flatten(1) @ weights["o_proj.weight"].T
