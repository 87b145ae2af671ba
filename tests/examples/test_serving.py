"""The engine end to end with small pairs: what it yields never depends on what was cached."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from engine import Engine, EngineConfig, RequestError
from model import ContiguousCache
from paged import PageTable
from request import Request
from scheduler import Scheduler
from small_pairs import small_pair
from speculation import GUESSES

from hicache_storage import PairedStore, Store, open_store
from hicache_storage.keys import draft_key, page_hashes

PAGE = 4
SEED = 9  # with these weights about every second guess is right, of either pair
LIMIT_S = 60


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://") as opened:
        yield opened


@pytest.fixture(params=["mha", "mla"])
def attention(request: pytest.FixtureRequest) -> str:
    return request.param


def make_engine(attention: str = "mha", **config) -> Engine:
    target, head = small_pair(attention, seed=SEED)
    sizes = {"page_size": PAGE, "device_pages": 32, "host_pages": 64} | config
    return Engine(target, head, name=attention, config=EngineConfig(**sizes))


def prompt_of(length: int, seed: int = 0, vocab: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


def serve(engine: Engine, *prompts: list[int], new_tokens: int = 20, **options) -> list[Request]:
    """Serve the prompts side by side, and wait until their pages are stored."""
    scheduler = Scheduler(engine, **options)
    requests = [
        scheduler.submit(engine.request(f"request-{i}", prompt, new_tokens))
        for i, prompt in enumerate(prompts)
    ]
    finish(scheduler)
    assert engine.cache.wait_idle(LIMIT_S)
    return requests


def finish(scheduler: Scheduler) -> None:
    until = time.monotonic() + LIMIT_S
    while scheduler.waiting or scheduler.running:
        assert time.monotonic() < until, "requests wait for ever"
        scheduler.step()


def serve_once(
    prompt: list[int],
    attention: str = "mha",
    *,
    store: Store | None = None,
    pairing: str = "best_effort",
    new_tokens: int = 20,
    **config,
) -> Request:
    """Serve one prompt on an engine of its own, as a new process would."""
    engine = make_engine(attention, **config)
    if store is not None:
        engine.attach_storage(store, pairing=pairing)
    try:
        return serve(engine, prompt, new_tokens=new_tokens)[0]
    finally:
        engine.close()


def pairs_of(store: Store, attention: str = "mha", **config) -> PairedStore:
    engine = make_engine(attention, **config)
    pairs = engine.attach_storage(store)
    engine.close()
    return pairs


def all_pages_are_free_or_cached(engine: Engine) -> bool:
    stats = engine.cache.stats()
    return stats.device_pages + stats.free_device_pages == engine.config.device_pages


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 23])
def test_serving_yields_what_plain_decoding_yields(attention, length):
    from test_speculation import alone

    prompt = prompt_of(length)
    request = serve_once(prompt, attention, dtype=torch.float32, new_tokens=40)
    assert request.output == alone(small_pair(attention, seed=SEED)[0], prompt, 40)


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct"])
@pytest.mark.parametrize("length", [7, 8, 9, 10, 23, 24, 25])
def test_a_restored_run_equals_the_cold_one(attention, length, layout, store):
    prompt = prompt_of(length)
    cold = serve_once(prompt, attention, store=store, layout=layout)
    restored = serve_once(prompt, attention, store=store, layout=layout)
    pages = (length - 1) // PAGE
    assert cold.measures.storage_tokens == 0
    assert restored.measures.storage_tokens == pages * PAGE
    assert (restored.measures.draft_hits, restored.measures.lost_drafts) == (pages, 0)
    assert restored.output == cold.output
    assert restored.measures.accept_length == cold.measures.accept_length


def test_a_restored_run_computes_the_very_bits_of_the_cold_one(attention, store):
    """Every row of both pools, not only what comes of them."""
    prompt, rows = prompt_of(23), []
    for _ in range(2):
        engine = make_engine(attention)
        engine.attach_storage(store)
        scheduler = Scheduler(engine)
        request = scheduler.submit(engine.request("one", prompt, 20))
        while request.done < len(prompt):
            scheduler.step()
        slots = request.table.slots[: len(prompt)]
        rows.append([
            tensor[slots]
            for pool in (engine.target_pool, engine.draft_pool)
            for layer in range(pool.geometry.layers)
            for tensor in pool.layer_tensors(layer)
        ])  # fmt: skip
        finish(scheduler)
        assert engine.cache.wait_idle(LIMIT_S)
        engine.close()
    assert request.measures.storage_tokens == 20
    assert all(torch.equal(cold, restored) for cold, restored in zip(*rows, strict=True))


def test_a_restored_run_computes_in_the_shapes_of_the_cold_one(store, monkeypatch):
    """Other shapes may round differently, and then the same prompt has two outputs."""
    prompt, runs = prompt_of(23), []
    for _ in range(2):
        engine, pieces = make_engine(), []
        engine.attach_storage(store)
        monkeypatch.setattr(
            engine.target,
            "forward",
            lambda tokens, positions, kv, forward=engine.target.forward, pieces=pieces: (
                pieces.append((int(positions[0]), len(tokens))),
                forward(tokens, positions, kv),
            )[1],
        )
        serve(engine, prompt)
        engine.close()
        runs.append(pieces)
    cold, restored = runs
    assert cold[:6] == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4), (20, 3)]
    assert restored == cold[5:]


def test_the_rows_handed_over_are_the_targets_word_and_no_guesses(attention):
    """Guessing writes draft rows from the draft's own output; none of them may reach a page."""
    prompt = prompt_of(9)
    engine = make_engine(attention, dtype=torch.float32)
    request = serve(engine, prompt, new_tokens=50)[0]
    assert request.measures.verified_tokens > request.measures.steps, "no guess was right"
    hashes = engine.hashes(request.known)
    lease = engine.cache.acquire("look", hashes)
    assert len(lease) == len(hashes) == (9 + 50 - 1) // PAGE

    target, head = small_pair(attention, seed=SEED)
    target_kv = ContiguousCache(3, torch.float32)
    draft_kv = ContiguousCache(1, torch.float32)
    tokens = torch.tensor(request.known)
    positions = torch.arange(len(tokens))
    states = target(tokens, positions, target_kv)
    head(tokens[1:], head.fuse(states.features[:-1]), positions[:-1], draft_kv)

    table = PageTable(lease.device_indices, PAGE, engine.device)
    for pool, kv in ((engine.target_pool, target_kv), (engine.draft_pool, draft_kv)):
        for layer in range(pool.geometry.layers):
            expected = [rows[layer] for rows in (kv.k, kv.v) if rows[layer] is not None]
            for tensor, rows in zip(pool.layer_tensors(layer), expected, strict=True):
                torch.testing.assert_close(
                    tensor[table.slots], rows[: table.room_tokens], rtol=1e-3, atol=1e-4
                )
    engine.cache.release(lease)
    engine.close()


def test_generated_pages_are_restored_too(attention, store):
    prompt = prompt_of(9)
    exact = {"dtype": torch.float32}  # decoding and prefill round to bfloat16 differently
    first = serve_once(prompt, attention, store=store, new_tokens=21, **exact)
    longer = prompt + first.output
    cold = serve_once(longer, attention, **exact)
    restored = serve_once(longer, attention, store=store, **exact)
    assert restored.measures.storage_tokens == (len(longer) - 1) // PAGE * PAGE
    assert restored.measures.lost_drafts == 0
    assert restored.output == cold.output


def test_a_prompt_that_goes_on_differently_shares_only_equal_pairs(store):
    """Page 1 of the second prompt has the same tokens, but another token follows it."""
    prompt = prompt_of(9)
    serve_once(prompt, store=store)
    other = [*prompt[:8], (prompt[8] + 1) % 5]
    restored = serve_once(other, store=store)
    assert restored.measures.storage_tokens == PAGE
    assert restored.output == serve_once(other).output


def test_a_lost_draft_is_counted_and_changes_no_token(attention, store):
    prompt = prompt_of(23)
    cold = serve_once(prompt, attention, store=store)
    pairs = pairs_of(store, attention)
    lost = [draft_key(cold.hashes[page]) for page in (1, 3)]
    assert all(store.delete(pairs.draft, lost))
    restored = serve_once(prompt, attention, store=store)
    assert restored.measures.storage_tokens == 20
    assert (restored.measures.draft_hits, restored.measures.lost_drafts) == (3, 2)
    assert restored.output == cold.output
    for key in lost:
        assert store.exists(pairs.draft, [key]) == 0, "a zeroed stand-in was stored as a draft"


def test_required_pairs_end_a_hit_at_the_first_lost_draft_and_heal_it(attention, store):
    prompt = prompt_of(23)
    cold = serve_once(prompt, attention, store=store)
    pairs = pairs_of(store, attention)
    drafts = [draft_key(page) for page in cold.hashes]
    assert all(store.delete(pairs.draft, [drafts[2]]))
    required = serve_once(prompt, attention, store=store, pairing="required")
    assert required.measures.storage_tokens == 2 * PAGE
    assert (required.measures.draft_hits, required.measures.lost_drafts) == (2, 0)
    assert required.output == cold.output
    assert required.measures.accept_length == cold.measures.accept_length
    assert store.exists(pairs.draft, drafts) == len(drafts)


def test_other_weights_and_tenants_never_share_pages(store):
    prompt = prompt_of(23)
    serve_once(prompt, store=store)
    for revision, tenant in (("other", ""), ("", "other")):
        target, head = small_pair("mha", seed=SEED)
        config = EngineConfig(page_size=PAGE, device_pages=32, host_pages=64)
        engine = Engine(target, head, name="mha", revision=revision, config=config)
        engine.attach_storage(store, tenant=tenant)
        request = serve(engine, prompt)[0]
        engine.close()
        assert request.measures.storage_tokens == 0


def test_pages_go_through_files(tmp_path, attention):
    prompt = prompt_of(23)
    outputs = []
    for expected in (0, 20):
        with open_store(f"file://{tmp_path}/kv") as files:
            request = serve_once(prompt, attention, store=files)
        assert request.measures.storage_tokens == expected
        outputs.append(request.output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("most_running", [1, 4])
def test_requests_side_by_side_yield_what_they_yield_alone(attention, most_running, store):
    prefix = prompt_of(17)
    prompts = [prefix + prompt_of(3 + i, seed=i + 1) for i in range(4)] + [prefix, prompt_of(2)]
    expected = [serve_once(prompt, attention).output for prompt in prompts]
    engine = make_engine(attention, device_pages=64)
    engine.attach_storage(store)
    requests = serve(engine, *prompts, most_running=most_running)
    assert [request.output for request in requests] == expected
    assert all_pages_are_free_or_cached(engine)
    engine.close()


def test_a_shared_prefix_is_found_on_the_device(attention):
    prefix = prompt_of(17)
    engine = make_engine(attention)
    serve(engine, [*prefix, 1, 2, 3])
    second = serve(engine, [*prefix, 3, 2, 1])[0]
    assert second.measures.device_tokens == 16
    assert second.measures.storage_tokens == second.measures.host_tokens == 0
    assert second.output == serve_once([*prefix, 3, 2, 1], attention).output
    engine.close()


def test_pages_that_the_device_gave_up_come_back_from_the_host(attention):
    prompts = [prompt_of(23, seed=i) for i in range(4)]
    engine = make_engine(attention, device_pages=13)
    first = [serve(engine, prompt)[0] for prompt in prompts]
    again = [serve(engine, prompt)[0] for prompt in prompts]
    assert engine.cache.stats().device_evictions > 0
    assert sum(request.measures.host_tokens for request in again) > 0
    assert [a.output for a in again] == [f.output for f in first]
    assert [f.output for f in first] == [serve_once(p, attention).output for p in prompts]
    assert all_pages_are_free_or_cached(engine)
    engine.close()


def test_a_full_pool_makes_requests_wait_and_nothing_else(attention):
    """Five requests that each need most of the pool are submitted at once."""
    prompts = [prompt_of(23, seed=i) for i in range(5)]
    engine = make_engine(attention, device_pages=13, host_pages=16)
    requests = serve(engine, *prompts)
    assert [r.output for r in requests] == [serve_once(p, attention).output for p in prompts]
    assert all_pages_are_free_or_cached(engine)
    engine.close()


def test_storage_restores_what_both_memories_gave_up(attention, store):
    prompts = [prompt_of(23, seed=i) for i in range(6)]
    engine = make_engine(attention, device_pages=13, host_pages=14)
    engine.attach_storage(store)
    first = [serve(engine, prompt)[0] for prompt in prompts]
    again = [serve(engine, prompt)[0] for prompt in prompts]
    assert sum(request.measures.storage_tokens for request in again) > 0
    assert [a.output for a in again] == [f.output for f in first]
    assert sum(request.measures.lost_drafts for request in again) == 0
    engine.close()


def test_speculation_does_not_wear_off_over_many_rounds(attention, store):
    """Prompts come and go through small pools while drafts are lost from storage: whoever has
    all drafts accepts as many guesses as in a cold run, to the last round."""
    rng = random.Random(attention)
    stem = prompt_of(9)
    prompts = [stem + prompt_of(rng.randint(4, 16), seed=i + 1) for i in range(6)]
    cold = [serve_once(prompt, attention) for prompt in prompts]
    engine = make_engine(attention, device_pages=13, host_pages=14)
    pairs = engine.attach_storage(store)
    seen = Counter()
    for _ in range(40):
        which = rng.randrange(len(prompts))
        request = serve(engine, prompts[which])[0]
        assert request.output == cold[which].output
        if not request.measures.lost_drafts:
            assert request.measures.accept_length == cold[which].measures.accept_length
        seen.update(
            storage=request.measures.storage_tokens > 0, lost=request.measures.lost_drafts > 0
        )
        store.delete(pairs.draft, [draft_key(rng.choice(request.hashes))])
    assert seen["storage"] > 5
    assert 0 < seen["lost"] < 35
    engine.close()


def test_a_store_that_fails_costs_hits_and_nothing_else(attention, store):
    prompt = prompt_of(23)
    cold = serve_once(prompt, attention, store=store)
    engine = make_engine(attention)
    engine.attach_storage(store)
    store.close()  # every call of the cache's threads raises from now on
    request = serve(engine, prompt)[0]
    assert request.output == cold.output
    assert request.measures.storage_tokens == 0
    engine.close()


def test_tokens_are_handed_on_as_they_come():
    engine = make_engine()
    parts: list[list[int]] = []
    request = engine.request("one", prompt_of(9), 30, on_tokens=lambda _, new: parts.append(new))
    scheduler = Scheduler(engine)
    scheduler.submit(request)
    finish(scheduler)
    assert [token for part in parts for token in part] == request.output
    assert len(request.output) == 30
    assert len(parts[0]) == 1, "the first token comes before anything is guessed"
    assert max(map(len, parts)) <= GUESSES + 1
    assert len(parts) == request.measures.steps + 1


def test_time_counts_from_submission_and_not_from_the_making_of_a_request():
    engine = make_engine()
    request = engine.request("one", prompt_of(9), 3)
    time.sleep(0.2)
    before = time.perf_counter()
    scheduler = Scheduler(engine)
    scheduler.submit(request)
    finish(scheduler)
    assert before <= request.measures.submitted_s <= request.measures.first_token_s
    assert request.measures.first_token_s <= request.measures.last_token_s <= time.perf_counter()
    engine.close()


def test_a_stop_token_ends_the_output_before_it():
    engine = make_engine()
    prompts = [prompt_of(9, seed) for seed in range(8)]
    wholes = [request.output for request in serve(engine, *prompts, new_tokens=30)]
    prompt, whole = next((p, w) for p, w in zip(prompts, wholes, strict=True) if len(set(w)) > 1)
    stop = next(token for token in whole if token != whole[0])
    request = engine.request("stopped", prompt, 30, stop=frozenset({stop}))
    scheduler = Scheduler(engine)
    scheduler.submit(request)
    finish(scheduler)
    assert request.output == whole[: whole.index(stop)]
    assert all_pages_are_free_or_cached(engine)
    engine.close()


@pytest.mark.parametrize("new_tokens", [1, 2, 5, 8, 9])
def test_exactly_so_many_tokens_are_generated(new_tokens):
    request = serve_once(prompt_of(9), new_tokens=new_tokens)
    assert len(request.output) == new_tokens


def test_a_callback_that_raises_costs_no_page():
    engine = make_engine()

    def broken(request: Request, new: list[int]) -> None:
        if len(request.output) > 5:
            raise OSError("the client went away")

    scheduler = Scheduler(engine)
    scheduler.submit(engine.request("broken", prompt_of(9), 30, on_tokens=broken))
    other = scheduler.submit(engine.request("other", prompt_of(10), 30))
    with pytest.raises(OSError, match="went away"):
        finish(scheduler)
    finish(scheduler)
    assert other.output == serve_once(prompt_of(10), new_tokens=30).output
    assert all_pages_are_free_or_cached(engine)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_cancelled_request_gives_its_pages_back(steps, store):
    engine = make_engine()
    engine.attach_storage(store)
    scheduler = Scheduler(engine, most_running=1)
    first = scheduler.submit(engine.request("first", prompt_of(9), 30))
    second = scheduler.submit(engine.request("second", prompt_of(10), 30))
    for _ in range(steps):
        scheduler.step()
    scheduler.cancel(first)
    finish(scheduler)
    assert second.output == serve_once(prompt_of(10), new_tokens=30).output
    assert all_pages_are_free_or_cached(engine)
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        ([], 5, "needs a prompt"),
        ([1], 0, "at least 1 new token"),
        ([1, 5], 5, "token ids must be from 0 to 4"),
        ([-1], 5, "token ids must be from 0 to 4"),
        ([1] * 90, 11, "101, more than the models' context of 100 tokens"),
        ([1] * 40, 20, "60 tokens need 17 pages of 4 tokens, but the device pool has 16"),
    ],
)
def test_what_cant_be_served_is_refused_before_it_is_queued(prompt, new_tokens, message):
    engine = make_engine(device_pages=16, context_tokens=100)
    with pytest.raises(RequestError, match=message):
        engine.request("one", prompt, new_tokens)
    engine.close()


def test_the_whole_pool_can_be_used_by_one_request(attention):
    """16 pages hold 64 tokens: 20 + 37 and the guesses behind the last one."""
    request = serve_once(prompt_of(20), attention, device_pages=16, new_tokens=64 - 20 - GUESSES)
    assert len(request.output) == 37


def test_the_last_prompt_token_lies_in_no_named_page():
    engine = make_engine()
    for length in range(1, 14):
        assert len(engine.hashes(prompt_of(length))) == (length - 1) // PAGE
    tokens = prompt_of(9)
    assert engine.hashes(tokens) == page_hashes(tokens, PAGE, mode="pairs")
