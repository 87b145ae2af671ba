"""Middleware round a store: named by options, in a fixed order, and a healthy store is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from middleware.conftest import KEY, OTHER
from recording import RecordingBackend

from hicache_storage import ConfigError, Namespace, Store, open_store
from hicache_storage.calling import Caller
from hicache_storage.middleware.around import Around
from hicache_storage.middleware.breaker import Breaker
from hicache_storage.middleware.retry import Retry
from hicache_storage.middleware.stack import INNERMOST_FIRST, split_middleware, stack

ALL = list(INNERMOST_FIRST)


@pytest.mark.parametrize("names", [[name] for name in ALL] + [ALL])
def test_a_healthy_store_works_the_same_inside_every_middleware(
    names: list[str], target_namespace: Namespace, hashes: Callable[[int], list[str]]
) -> None:
    store = Store(stack(RecordingBackend(), "memory", {name: {} for name in names}), name="memory")
    assert store.capabilities - {"open", "close"} == Store(RecordingBackend()).capabilities
    keys, got = hashes(3), [bytearray(512) for _ in range(3)]
    assert store.batch_set(target_namespace, keys[:2], [b"\1" * 512, b"\2" * 512]) == [True] * 2
    assert store.batch_get(target_namespace, keys, got) == [True, True, False]
    assert got[:2] == [b"\1" * 512, b"\2" * 512]
    assert store.exists(target_namespace, keys) == 2
    assert len(list(store.scan())) == 2
    assert store.delete(target_namespace, keys[:1]) == [True]
    assert store.exists(target_namespace, keys) == 0
    store.clear()
    assert store.usage().pages == 0
    store.close()


@pytest.mark.parametrize("name", ALL)
def test_a_middleware_has_the_capabilities_of_the_backend_inside(name: str) -> None:
    class Small(RecordingBackend):
        delete = scan = usage = clear = None  # type: ignore[assignment]

    small = Caller(stack(Small(), "small", {name: {}}), name="small")
    assert small.capabilities.isdisjoint({"delete", "scan", "usage", "clear"})


def test_around_passes_everything_on(backend: RecordingBackend) -> None:
    caller = Caller(Around(Caller(backend, name="memory")), name="memory")
    caller.exists([KEY], [OTHER])
    assert backend.calls == [("exists", [KEY], [OTHER])]
    assert caller.scope == "process"


@pytest.mark.parametrize("middleware", ["retry", "deadline"])
def test_a_batch_is_one_call_where_it_may_be_made_again_or_left_behind(
    middleware: str, target_namespace: Namespace, hashes: Callable[[int], list[str]]
) -> None:
    """So a deadline is that of a batch, and a retry repeats all of it."""
    backend, keys = RecordingBackend(), hashes(5)
    backend.call_pages = 1
    with Store(stack(backend, "memory", {middleware: {}})) as store:
        store.open()
        assert store.batch_set(target_namespace, keys, [bytes(512)] * 5) == [True] * 5
        hits = store.batch_get(target_namespace, keys, [bytearray(512) for _ in keys])
        assert hits == [True] * 5
    assert backend.requests("batch_set") == backend.requests("batch_get") == [keys]


def test_middleware_is_named_by_its_options_in_a_fixed_order() -> None:
    own, asked = split_middleware(
        {
            "capacity": "1MiB",
            "retry.attempts": "5",
            "breaker": True,
            "limit": {"calls": 2},
            "deadline": "off",
        }
    )
    assert own == {"capacity": "1MiB"}
    assert asked == {"retry": {"attempts": "5"}, "breaker": {}, "limit": {"calls": 2}}
    layer: Any = stack(RecordingBackend(), "memory", asked)
    names = []
    while isinstance(layer, Around):
        names.append(type(layer).__name__)
        layer = layer.inner.backend
    assert names == ["Breaker", "Retry", "Limit"]


def test_a_url_may_name_middleware() -> None:
    with open_store("memory://?capacity=1MiB&retry.attempts=7&breaker=on") as store:
        assert isinstance(store._caller.backend, Breaker)
        assert store.usage().capacity_bytes == 1 << 20
        assert isinstance(store._caller.backend.inner.backend, Retry)
        assert store._caller.backend.inner.backend.config.attempts == 7


@pytest.mark.parametrize(
    "url", ["memory://?retry.atempts=7", "memory://?retry.attempts=many", "memory://?retry=7"]
)
def test_a_wrong_middleware_option_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"'retry'.*(attempts|option '')"):
        open_store(url)
