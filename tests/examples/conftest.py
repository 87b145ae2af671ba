"""The example engine's modules on the path, and small pairs to test it with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ENGINE = HERE.parents[1] / "examples" / "engine"
sys.path[:0] = [str(ENGINE), str(HERE)]

from model import EagleHead, Target  # noqa: E402
from small_pairs import small_pair  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Small models run fastest, and always in the same order, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["mha", "mla"])
def pair(request: pytest.FixtureRequest) -> tuple[Target, EagleHead]:
    """A small pair of each kind of attention."""
    return small_pair(request.param)
