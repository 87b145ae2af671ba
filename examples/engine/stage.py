"""One stage of the demo: a process of its own that serves one prompt over a store.

Reads its `StageSettings` as JSON from standard input and writes JSON lines to standard output:
{"event": "doing", "text": ...} while it works, at last {"event": "result", ...} or
{"event": "error", "message": ...}.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from engine import Engine, EngineConfig, RequestError, pages_for
from model import BOS, SEP, copy_prompt, load_pair
from request import Request
from scheduler import Scheduler
from settings import StageSettings
from tokenizers import Tokenizer

from hicache_storage import HiCacheStorageError, open_store

IDLE_LIMIT_S = 120.0


def say(event: str, **fields: Any) -> None:
    """Write one line for the process that started this one."""
    print(json.dumps({"event": event, **fields}), flush=True)


def weights_digest(folder: Path) -> str:
    """Identity of the weights: other weights never read these pages."""
    digest = hashlib.sha256()
    for name in ("config.json", "target.safetensors", "draft.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:16]


def make_engine(settings: StageSettings) -> tuple[Engine, Tokenizer, list[int]]:
    """The engine with the pair loaded, its tokenizer, and the prompt's tokens."""
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise RequestError(f"no CUDA device is here for --device {settings.device}; try cpu")
    torch.set_num_threads(settings.threads)
    target, head, tokenizer = load_pair(settings.checkpoint)
    document = tokenizer.encode(Path(settings.prompt).read_text(encoding="utf-8")).ids
    prompt = copy_prompt(document, settings.prompt_tokens)
    page_size = settings.page_size
    if len(prompt) <= 2 * page_size:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; it needs more than two pages of {page_size} "
            "tokens, or there is nothing worth storing; give a longer text or a smaller page size"
        )
    pages = pages_for(len(prompt) + settings.new_tokens, page_size)
    config = EngineConfig(
        page_size=page_size,
        device_pages=pages,
        host_pages=2 * pages,
        layout=settings.layout,  # type: ignore[arg-type]
    )
    engine = Engine(
        target,
        head,
        name=settings.pair,
        revision=weights_digest(Path(settings.checkpoint)),
        config=config,
        device=settings.device,
    )
    return engine, tokenizer, prompt


def serve(settings: StageSettings) -> dict[str, Any]:
    """Load the models, serve the prompt once, leave its pages in the store."""
    engine, tokenizer, prompt = make_engine(settings)
    stop = frozenset((BOS, SEP))
    request = engine.request("demo", prompt, settings.new_tokens, stop=stop)
    with open_store(settings.store) as store:
        pairs = engine.attach_storage(
            store,
            pairing=settings.pairing,  # type: ignore[arg-type]
            tenant=settings.tenant,
        )
        if settings.fresh and pairs.exists(request.hashes[:1]).target:
            raise RequestError(
                f"the store has this prompt's pages already (tenant {settings.tenant!r}), so this "
                "run would not be cold; leave out --tenant, or give another one"
            )
        engine.warm_up()
        say("doing", text="serving")
        scheduler = Scheduler(engine)
        scheduler.submit(request)
        scheduler.run()
        say("doing", text="writing pages")
        if not engine.cache.wait_idle(IDLE_LIMIT_S):
            raise RequestError(f"pages were still being written after {IDLE_LIMIT_S:.0f} s")
        stats = engine.cache.stats()
        engine.close()
        if "flush" in store.capabilities:
            store.flush()
    return {
        **figures(request),
        "written_pages": stats.written_pages,
        "written_drafts": stats.written_drafts,
        "storage_errors": stats.storage_errors,
        "output": request.output,
        "text": tokenizer.decode(request.output),
        "hashes": engine.hashes(request.known),
        "namespaces": [pairs.target.canonical, pairs.draft.canonical if pairs.draft else None],
        "torch": torch.__version__,
    }


def figures(request: Request) -> dict[str, Any]:
    """What the request measured."""
    measures, new_tokens = request.measures, len(request.output)
    decode_s = measures.last_token_s - measures.first_token_s
    return {
        "accept_length": measures.accept_length,
        "steps": measures.steps,
        "prompt_tokens": len(request.prompt),
        "prompt_pages": len(request.hashes),
        "new_tokens": new_tokens,
        "storage_tokens": measures.storage_tokens,
        "draft_hits": measures.draft_hits,
        "lost_drafts": measures.lost_drafts,
        "time_to_first_token_s": measures.time_to_first_token_s,
        "tokens_per_s": (new_tokens - 1) / decode_s if decode_s > 0 else 0.0,
    }


def main() -> int:
    """Run the stage; 0 if it ended with a result."""
    try:
        result = serve(StageSettings(**json.load(sys.stdin)))
    except (HiCacheStorageError, OSError) as error:
        say("error", message=str(error))
        return 1
    say("result", **result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
