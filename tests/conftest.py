"""Shared fixtures: a small namespace, its draft's, and page hashes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from page_names import page_hash

from hicache_storage import Namespace

# How long an example takes says how busy the machine is.
settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")


@pytest.fixture
def hashes() -> Callable[[int], list[str]]:
    """`hashes(n)`: the first n page hashes."""
    return lambda count: [page_hash(i) for i in range(count)]


@pytest.fixture
def target_namespace() -> Namespace:
    """Two layers, four tokens, two heads of eight bfloat16: pages of 512 bytes."""
    return Namespace(
        model="org/model",
        pool="mha",
        dtype="bfloat16",
        page_size=4,
        page_bytes=512,
        layers=2,
        heads=2,
        head_dim=8,
        v_head_dim=8,
        order="layer_token",
    )


@pytest.fixture
def draft_namespace() -> Namespace:
    """One layer of the same shape: pages of 256 bytes."""
    return Namespace(
        model="org/model-draft",
        pool="mha",
        dtype="bfloat16",
        page_size=4,
        page_bytes=256,
        layers=1,
        heads=2,
        head_dim=8,
        v_head_dim=8,
        order="layer_token",
    )


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell started the tests in the background,
    which then ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
