"""What SGLang's processes do with the command line, run in a process of its own.

python launching.py parse s3          the flag through SGLang's parser, before and after plugins
python launching.py spawn s3 URL      a spawned scheduler's factory makes the backend
python launching.py imports           what loading plugins imports
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import sglang_stand_ins

sglang_stand_ins.install()

FLAG = "--hicache-storage-backend"
COMMAND = ["--model-path", "dummy", "--device", "cpu", "--enable-hierarchical-cache", FLAG]


def accepted(name: str) -> str | None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        found: str = parser.parse_args([*COMMAND, name]).hicache_storage_backend
        return found
    return None


def parse(name: str) -> dict[str, Any]:
    from sglang.srt import server_args
    from sglang.srt.plugins import load_plugins

    before = accepted(name)
    load_plugins()
    load_plugins()
    keywords = server_args.ServerArgs(
        model_path="dummy", device="cpu", enable_hierarchical_cache=True,
        hicache_storage_backend=name,
    )  # fmt: skip
    return {
        "before": before,
        "after": accepted(name),
        "prepared": server_args.prepare_server_args([*COMMAND, name]).hicache_storage_backend,
        "keywords": keywords.hicache_storage_backend,
        "builtin": accepted("file"),
        "unknown": accepted("s4"),
    }


def imports(*modules: str) -> dict[str, Any]:
    from sglang.srt.plugins import load_plugins

    for module in modules:
        importlib.import_module(module)
    before = set(sys.modules)
    load_plugins()
    new = set(sys.modules) - before
    heavy = ("sglang", "torch", "numpy", "boto3", "botocore", "lmdb")
    return {"heavy": sorted(name for name in new if name.split(".")[0] in heavy)}


def schedule(name: str, url: str, answers: Any) -> None:
    """A scheduler process: it loads plugins first, then builds the cache."""
    sglang_stand_ins.install()
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.plugins import load_plugins

    registered = name in StorageBackendFactory._registry
    load_plugins()
    values = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "m", "extra_config": {"url": url},
    }  # fmt: skip
    config = HiCacheStorageConfig(**values)
    backend = StorageBackendFactory.create_backend(name, config, None)
    answers.put({"before": registered, "class": type(backend).__name__})
    backend.close()


def spawn(name: str, url: str) -> dict[str, Any]:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found = {}
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        answers = context.Queue()
        process = context.Process(target=schedule, args=(name, url, answers))
        process.start()
        found[method] = answers.get(timeout=120)
        process.join(30)
    return found


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    print(json.dumps({"parse": parse, "imports": imports, "spawn": spawn}[verb](*rest)))
