"""Any order of calls leaves a store in the state that a dict has."""

import tempfile
from uuid import uuid4

import pytest
from hypothesis import settings

from hicache_storage.testing.stateful import store_machine

LIMITS = settings(max_examples=40, stateful_step_count=30, deadline=None)

_directory = tempfile.TemporaryDirectory()

TestMemoryAgainstADict = store_machine(lambda: "memory://").TestCase
TestMemoryAgainstADict.settings = LIMITS

TestFileAgainstADict = store_machine(lambda: f"file://{_directory.name}/{uuid4().hex}").TestCase
TestFileAgainstADict.settings = LIMITS


@pytest.fixture(scope="module", autouse=True)
def _remove_directory():
    yield
    _directory.cleanup()
