"""Real SGLang on a CPU: stand-ins for its GPU packages, one rank without processes, stores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_servers import seaweedfs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import sglang_stand_ins

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


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """`store_url("s3")`: the URL of an empty store of that kind."""

    def make(kind: str) -> str:
        if kind == "s3":
            url: str = request.getfixturevalue("seaweedfs").store_url()
            return url
        return f"{kind}://{tmp_path / kind}"

    return make
