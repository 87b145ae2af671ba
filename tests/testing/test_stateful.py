"""Any order of calls leaves a store in the state that a dict has."""

import tempfile
from uuid import uuid4

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hicache_storage.testing.stateful import store_machine

LIMITS = settings(max_examples=40, stateful_step_count=30, deadline=None)

_directory = tempfile.TemporaryDirectory()

TestMemoryAgainstADict = store_machine(lambda: "memory://").TestCase
TestMemoryAgainstADict.settings = LIMITS

TestFileAgainstADict = store_machine(lambda: f"file://{_directory.name}/{uuid4().hex}").TestCase
TestFileAgainstADict.settings = LIMITS


@pytest.mark.parametrize(
    "fault",
    [
        "DropsTheNamespace",
        "DropsTheTag",
        "KeepsTheFirst",
        "MissSpoilsTheBatch",
        "PretendsToDelete",
        "RefusesWhatIsThere",
        "RemembersMisses",
        "ScansTwice",
        "CachesTheCallersBuffers",
    ],
)
def test_the_state_machine_finds_a_store_that_does_otherwise(fault):
    machine = store_machine(lambda: {"fault": fault}, opener="testing.broken_backends:open_broken")
    limits = settings(
        max_examples=1000,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=limits)


@pytest.fixture(scope="module", autouse=True)
def _remove_directory():
    yield
    _directory.cleanup()
