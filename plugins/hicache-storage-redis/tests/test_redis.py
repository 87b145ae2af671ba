"""What the kit can't ask of every backend: pipelines, expiry, memory policy, a server away."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hicache_storage_redis import RedisBackend, RedisConfig
from hicache_storage_redis.errors import is_of_one_page
from redis_servers import Server, free_port, one_server

from hicache_storage import (
    BackendTimeout,
    BackendUnavailable,
    ConfigError,
    Namespace,
    Store,
    open_store,
)
from hicache_storage.config import build_config

pytestmark = pytest.mark.servers
NAMESPACE = Namespace(
    model="m", pool="opaque", dtype="uint8", page_size=1, page_bytes=4096, layers=1, heads=1,
    head_dim=4096, v_head_dim=0, order="opaque",
)  # fmt: skip
KEYS = [f"{i:064x}" for i in range(300)]


def url(server: Server, **options: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"redis://{server.address}/{uuid.uuid4().hex}?{query}"


@pytest.fixture
def full_server(tmp_path: Path) -> Iterator[Server]:
    limits = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with one_server(tmp_path / "full", *limits) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    with one_server(tmp_path / "own") as server:
        yield server


def commands(server: Server) -> int:
    with redis.Redis(port=server.port) as client:
        return int(client.info("stats")["total_commands_processed"])


def connections(server: Server) -> int:
    with redis.Redis(port=server.port) as client:
        return int(client.info("stats")["total_connections_received"])


def test_a_lookup_of_many_pages_is_one_connection_and_one_command_a_page(
    own_server: Server,
) -> None:
    with open_store(url(own_server)) as store:
        store.batch_set(NAMESPACE, KEYS, [bytes(4096)] * 300)
        before, opened = commands(own_server), connections(own_server)
        assert store.exists(NAMESPACE, KEYS) == 300
        assert commands(own_server) - before <= 300 + 4
        assert connections(own_server) - opened == 2, "the two that ask for these counts"


def test_pages_move_in_pipelines_of_bounded_size() -> None:
    backend = RedisBackend(RedisConfig(pipeline=10_000))
    pages = [(memoryview(bytes(64)), memoryview(bytes(4096)))] * 5
    assert list(backend._portions(pages)) == [(0, 2), (2, 4), (4, 5)]
    big = [(memoryview(bytes(64)), memoryview(bytes(20_000)))] * 2
    assert list(backend._portions(big)) == [(0, 1), (1, 2)]


def test_a_page_that_is_read_lives_on_and_one_that_is_not_expires(redis_server: Server) -> None:
    with open_store(url(redis_server, ttl_s=2)) as store:
        store.batch_set(NAMESPACE, KEYS[:2], [bytes(4096)] * 2)
        for _ in range(6):
            time.sleep(0.5)
            assert store.batch_get(NAMESPACE, KEYS[:1], [bytearray(4096)]) == [True]
        assert store.batch_get(NAMESPACE, KEYS[:2], [bytearray(4096)] * 2) == [True, False]


def test_a_full_server_refuses_pages_and_goes_on_reading(
    full_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(url(full_server)) as store:
        assert "noeviction" in caplog.text
        keys = [f"{i:064x}" for i in range(600)]
        stored = store.batch_set(NAMESPACE, keys, [bytes(4096)] * 600)
        assert 0 < sum(stored) < 600
        got = [bytearray(4096) for _ in keys]
        assert store.batch_get(NAMESPACE, keys, got) == stored
        assert store.usage().capacity_bytes == 3 << 20


def test_a_value_of_another_type_is_a_miss_and_spoils_no_neighbour(redis_server: Server) -> None:
    where = url(redis_server)
    prefix = where.rpartition("/")[2].partition("?")[0]
    with open_store(where) as store, redis.Redis(port=redis_server.port) as client:
        store.batch_set(NAMESPACE, KEYS[:3], [bytes(4096)] * 3)
        name = f"{prefix}/{NAMESPACE.digest}/{KEYS[1]}"
        client.delete(name)
        client.lpush(name, "not a page")
        got = [bytearray(4096) for _ in range(3)]
        assert store.batch_get(NAMESPACE, KEYS[:3], got) == [True, False, True]
        assert store.batch_set(NAMESPACE, KEYS[1:2], [bytes(4096)]) == [True]


def test_other_peoples_names_are_neither_scanned_nor_cleared(redis_server: Server) -> None:
    where = url(redis_server)
    prefix = where.rpartition("/")[2].partition("?")[0]
    with open_store(where) as store, redis.Redis(port=redis_server.port) as client:
        for name in (f"{prefix}x/a", "unrelated", prefix):
            client.set(name, "theirs")
        store.batch_set(NAMESPACE, KEYS[:1], [bytes(4096)])
        assert len(list(store.scan())) == 1
        store.clear()
        assert list(store.scan()) == []
        assert all(client.exists(name) for name in (f"{prefix}x/a", "unrelated", prefix))


def test_a_server_that_is_away_fails_fast_and_is_found_again(own_server: Server) -> None:
    with open_store(url(own_server)) as store:
        store.batch_set(NAMESPACE, KEYS[:1], [bytes(4096)])
        own_server.stop()
        started = time.monotonic()
        for verb in (
            lambda: store.exists(NAMESPACE, KEYS[:1]),
            lambda: store.batch_get(NAMESPACE, KEYS[:1], [bytearray(4096)]),
            lambda: store.batch_set(NAMESPACE, KEYS[:1], [bytes(4096)]),
        ):
            with pytest.raises(BackendUnavailable) as caught:
                verb()
            assert caught.value.retryable
        assert time.monotonic() - started < 10
        own_server.start()
        assert store.batch_set(NAMESPACE, KEYS[:1], [bytes(4096)]) == [True]


def test_a_server_that_stalls_costs_the_stated_time(own_server: Server) -> None:
    with open_store(url(own_server, timeout_s=0.3)) as store:
        with redis.Redis(port=own_server.port) as client:
            client.execute_command("CLIENT", "PAUSE", 3000, "ALL")
        started = time.monotonic()
        with pytest.raises(BackendTimeout):
            store.exists(NAMESPACE, KEYS[:1])
        assert time.monotonic() - started < 2.5


def test_no_server_is_a_clear_error_at_opening() -> None:
    with pytest.raises(BackendUnavailable, match="redis"):
        open_store(f"redis://127.0.0.1:{free_port()}/kv")


def test_a_wrong_password_is_named_and_not_retried(tmp_path: Path) -> None:
    with one_server(tmp_path / "secret", "--requirepass", "s3cr3t-word") as server:
        with pytest.raises(BackendUnavailable, match="password") as caught:
            open_store(url(server, password="wrong-w0rd"))
        assert not caught.value.retryable
        assert "wrong-w0rd" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"address": "localhost"}, "HOST:PORT"),
        ({"address": "localhost:port"}, "HOST:PORT"),
        ({"prefix": "a{b}"}, "prefix"),
        ({"prefix": "a*"}, "prefix"),
        ({"prefix": ""}, "prefix"),
        ({"cluster": True, "db": 3}, "database 0"),
        ({"pasword": "x"}, "password"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(
    given: dict[str, object], words: str
) -> None:
    def open_with_options() -> None:
        Store(RedisBackend(build_config(RedisConfig, "redis", given))).open()

    with pytest.raises(ConfigError, match=words):
        open_with_options()


@pytest.mark.parametrize(
    ("error", "of_one_page"),
    [
        (redis.OutOfMemoryError("command not allowed"), True),
        (redis.ResponseError("WRONGTYPE not a string"), True),
        (redis.ReadOnlyError("a replica"), False),
        (redis.exceptions.NoPermissionError("no SET for you"), False),
        (redis.exceptions.ClusterDownError("The cluster is down"), False),
        (redis.ResponseError("LOADING the dataset"), False),
        (redis.ConnectionError("gone"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_fault_of_the_server_is_not_taken_for_a_miss(error: Exception, of_one_page: bool) -> None:
    assert is_of_one_page(error) is of_one_page


def test_the_password_is_in_no_text() -> None:
    config = build_config(RedisConfig, "redis", {"password": "s3cr3t-word"})
    assert "s3cr3t-word" not in repr(config) + repr(RedisBackend(config))


def test_a_cluster_spreads_pages_over_its_nodes(redis_cluster: list[Server]) -> None:
    where = f"redis://{redis_cluster[1].address}/{uuid.uuid4().hex}?cluster=true"
    with open_store(where) as store:
        assert store.batch_set(NAMESPACE, KEYS, [bytes(4096)] * 300) == [True] * 300
        counts = []
        for server in redis_cluster:
            with redis.Redis(port=server.port) as client:
                counts.append(client.dbsize())
        assert all(count > 40 for count in counts)
        assert store.exists(NAMESPACE, KEYS) == 300
        assert len(list(store.scan(NAMESPACE.digest))) == 300
