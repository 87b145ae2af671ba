"""Whatever storage does, the threads of SGLang's controller live and go on."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs a real SGLang wheel: make sglang")

from real_sglang.controllers import HAS_DRAFT_CALLS, PAGE, Server, hashes_of

from hicache_storage import BackendTimeout, Store
from hicache_storage.adapters import sglang_storage
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.testing.faults import (
    FaultyBackend,
    FlipBit,
    HalfFill,
    NoneResult,
    Raise,
    Refuse,
    ShortResult,
    Truncate,
)

TOKENS = list(range(100, 100 + 5 * PAGE))
OTHERS = list(range(900, 900 + 5 * PAGE))
TIMEOUT = BackendTimeout("slow", backend="memory", operation="any")
WRITE_FAULTS = [Raise(TIMEOUT), Raise(OSError(28, "full")), NoneResult(), ShortResult(), Refuse()]
READ_FAULTS = [
    Raise(TIMEOUT),
    Raise(ValueError("a bug")),
    NoneResult(),
    ShortResult(),
    Refuse(),
    HalfFill(),
    HalfFill(answer=True),
    FlipBit(100),
]
LOOKUP_FAULTS = [Raise(TIMEOUT), Raise(MemoryError()), NoneResult()]


@pytest.fixture
def backend() -> FaultyBackend:
    return FaultyBackend(MemoryBackend(MemoryConfig()))


@pytest.fixture(params=["flat", "in place"])
def server(
    request: pytest.FixtureRequest,
    serve: Any,
    backend: FaultyBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> Server:
    monkeypatch.setattr(sglang_storage, "open_store", lambda *_, **__: Store(backend, name="bad"))
    found: Server = serve("memory://", calls=request.param, draft=HAS_DRAFT_CALLS)
    found.fill(1)
    return found


def works(server: Server, tokens: list[int]) -> bool:
    written, stored = server.write(tokens)
    wanted = server.pages(written)
    read, came = server.prefetch(tokens)
    server.host.free(written)
    return (stored, came) == (len(tokens), len(tokens)) and server.pages(read) == wanted


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=lambda f: type(f).__name__)
def test_a_write_that_fails_is_acknowledged_and_the_next_one_works(
    server: Server, backend: FaultyBackend, fault: Any
) -> None:
    backend.inject("batch_set", fault)
    _, stored = server.write(TOKENS)
    assert stored == 0
    assert server.prefetch(TOKENS)[1] == 0
    backend.heal()
    assert works(server, OTHERS)
    assert server.threads_alive()


@pytest.mark.parametrize("fault", READ_FAULTS, ids=str)
@pytest.mark.parametrize("page", [0, 3])
def test_a_read_that_fails_ends_the_prefetch_there_and_the_next_one_works(
    server: Server, backend: FaultyBackend, fault: Any, page: int
) -> None:
    written, _ = server.write(TOKENS)
    wanted = server.pages(written)
    of_a_call = isinstance(fault, (Raise, NoneResult, ShortResult))
    target = server.storage.server.target.namespace.digest
    keys = {f"{target}/{key}" for key in hashes_of(TOKENS)[page:]}
    backend.inject("batch_get", fault, keys=keys)
    read, came = server.prefetch(TOKENS)
    assert came == (0 if of_a_call else page * PAGE)
    assert server.pages(read)[: came // PAGE] == wanted[: came // PAGE]
    backend.heal()
    assert works(server, OTHERS)
    assert server.threads_alive()


@pytest.mark.parametrize("fault", LOOKUP_FAULTS, ids=str)
def test_a_lookup_that_fails_finds_nothing_and_the_next_one_works(
    server: Server, backend: FaultyBackend, fault: Any
) -> None:
    server.write(TOKENS)
    backend.inject("exists", fault)
    assert server.prefetch(TOKENS)[1] == 0
    backend.heal()
    assert works(server, OTHERS)
    assert server.prefetch(TOKENS)[1] == len(TOKENS)
    assert server.threads_alive()


def test_a_page_cut_in_the_store_is_a_miss(server: Server, backend: FaultyBackend) -> None:
    target = server.storage.server.target.namespace.digest
    backend.inject("batch_set", Truncate(100), keys={f"{target}/{hashes_of(TOKENS)[2]}"})
    server.write(TOKENS)
    assert server.prefetch(TOKENS)[1] <= 2 * PAGE
    assert server.threads_alive()


def test_a_store_that_is_closed_under_way_finds_nothing(server: Server) -> None:
    server.write(TOKENS)
    server.storage.close()
    assert server.write(OTHERS)[1] == 0
    assert server.prefetch(TOKENS)[1] == 0
    assert server.threads_alive()
