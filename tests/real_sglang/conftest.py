"""Real SGLang on a CPU: stand-ins for its GPU packages, one rank without processes, stores."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_servers import seaweedfs

from hicache_storage.discovery import find_backends

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import sglang_stand_ins  # noqa: E402

sglang_stand_ins.install()

__all__ = ["seaweedfs"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("sglang")


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """What SGLang's launcher and schedulers do first."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`rank(tp_rank=1, tp_size=2)`: SGLang takes this process for that rank."""
    from real_sglang.controllers import set_rank

    undo = []

    def become(**ranks: int) -> None:
        undo.append(set_rank(monkeypatch, **ranks))

    become()
    yield become
    for context in reversed(undo):
        if context is not None:
            context.__exit__(None, None, None)


@pytest.fixture
def serve(rank: Any) -> Iterator[Callable[..., Any]]:
    """`serve(url, config, calls="in place", **options)`: a server; stopped after the test.

    `calls` "flat": SGLang passes pages as flat tensors, as it does to a backend without zero copy.
    """
    from real_sglang.controllers import Server, set_arguments

    set_arguments()
    servers: list[Any] = []

    def make(url: str, config: Any = None, *, calls: str = "in place", **options: Any) -> Any:
        extra = {"url": url, "revision": "r1", **(config or {})}
        server = Server("hicache_storage", extra, **options)
        servers.append(server)
        if calls == "flat":
            control = server.controller
            control.page_get_func = control._generic_page_get
            control.page_set_func = control._generic_page_set
            server.send_drafts_flat()
        return server

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def redis_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running Redis."""
    if "redis" not in find_backends() or importlib.util.find_spec("redis") is None:
        pytest.skip("needs the plugin hicache-storage-redis")
    sys.path.append(str(ROOT / "plugins" / "hicache-storage-redis" / "tests"))
    import redis_servers

    if redis_servers.BINARY is None:
        pytest.skip("needs redis-server")
    with redis_servers.one_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.address


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """`store_url("s3")`: the URL of an empty store of that kind."""

    def make(kind: str) -> str:
        if kind == "s3":
            url: str = request.getfixturevalue("seaweedfs").store_url()
            return url
        if kind == "redis":
            address = request.getfixturevalue("redis_address")
            return f"redis://{address}/{uuid.uuid4().hex}"
        return f"{kind}://{tmp_path / kind}"

    return make
