"""Each fault double does the harm that its name says, and no other."""

import time

import pytest
from recording import RecordingBackend

from hicache_storage import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    CapacityExceeded,
    ConfigError,
    ContractViolation,
    Namespace,
    Store,
)
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.keys import stored_key
from hicache_storage.testing.bench import kit_namespace
from hicache_storage.testing.doubles import CountingBackend
from hicache_storage.testing.faults import (
    FaultyBackend,
    FlipBit,
    HalfFill,
    Latency,
    LoseAnswer,
    NoneResult,
    Pretend,
    Raise,
    Refuse,
    ShortResult,
    Truncate,
)

SPACE = kit_namespace(200, "faults")
KEYS = [format(i, "064x") for i in range(4)]
NAMES = [stored_key(SPACE.digest, key) for key in KEYS]
PAGES = [bytes([i]) * 200 for i in range(4)]


@pytest.fixture
def faulty():
    return FaultyBackend(MemoryBackend(MemoryConfig()))


@pytest.fixture
def store(faulty):
    with Store(faulty) as store:
        store.batch_set(SPACE, KEYS, PAGES)  # writes the namespace's record too
        yield store


def get(store):
    buffers = [bytearray(200) for _ in KEYS]
    return store.batch_get(SPACE, KEYS, buffers), buffers


def test_without_faults_nothing_changes(store):
    assert get(store) == ([True] * 4, PAGES)
    assert store.capabilities >= {"delete", "scan", "usage", "clear"}
    assert store.scope == "process"


def test_latency_makes_the_call_longer(faulty, store):
    faulty.inject("batch_get", Latency(0.05), times=1)
    started_s = time.monotonic()
    assert get(store)[0] == [True] * 4
    assert time.monotonic() - started_s >= 0.05


@pytest.mark.parametrize(
    "cls", [BackendError, BackendUnavailable, BackendTimeout, CapacityExceeded]
)
def test_errors_are_raised_by_class_as_often_as_asked(faulty, store, cls):
    faulty.inject(
        "batch_get", Raise(lambda: cls("down", backend="x", operation="get")), skip=1, times=2
    )
    assert get(store)[0] == [True] * 4
    for _ in range(2):
        with pytest.raises(cls, match="down"):
            get(store)
    assert get(store)[0] == [True] * 4


@pytest.mark.parametrize("hook", ["batch_set", "batch_get", "exists", "delete", "usage", "scan"])
def test_any_hook_can_raise(faulty, store, hook):
    faulty.inject(hook, Raise(OSError(5, "I/O error")))
    calls = {
        "batch_set": lambda: store.batch_set(SPACE, KEYS, PAGES),
        "batch_get": lambda: get(store),
        "exists": lambda: store.exists(SPACE, KEYS),
        "delete": lambda: store.delete(SPACE, KEYS),
        "usage": store.usage,
        "scan": lambda: list(store.scan()),
    }
    with pytest.raises((BackendError, OSError), match="I/O error"):
        calls[hook]()


def test_refused_pages_are_not_stored_and_their_neighbours_are(faulty, store):
    store.delete(SPACE, KEYS)
    faulty.inject("batch_set", Refuse(), keys={NAMES[1]})
    assert store.batch_set(SPACE, KEYS, PAGES) == [True, False, True, True]
    assert get(store)[0] == [True, False, True, True]


def test_pretended_pages_are_answered_true_and_are_not_there(faulty, store):
    store.delete(SPACE, KEYS)
    faulty.inject("batch_set", Pretend(), keys={NAMES[1]})
    assert store.batch_set(SPACE, KEYS, PAGES) == [True] * 4
    assert get(store)[0] == [True, False, True, True]


def test_a_lost_answer_hides_work_that_was_done(faulty, store):
    store.delete(SPACE, KEYS)
    fault = faulty.inject("batch_set", LoseAnswer(), keys={NAMES[1]})
    assert store.batch_set(SPACE, KEYS, PAGES) == [True, False, True, True]
    fault.remove()
    assert get(store) == ([True] * 4, PAGES)


def test_a_truncated_page_is_stored_short_and_never_used(faulty, store):
    faulty.inject("batch_set", Truncate(100), keys={NAMES[2]}, times=1)
    assert store.batch_set(SPACE, KEYS, PAGES) == [True] * 4
    assert {page.stored_bytes for page in store.scan()} == {264, 100}
    assert get(store)[0] == [True, True, False, True]


@pytest.mark.parametrize("offset_bytes", [0, 63, 64, 263])
def test_a_bit_flipped_on_the_way_in_is_seen_and_the_page_put_aside(faulty, store, offset_bytes):
    faulty.inject("batch_set", FlipBit(offset_bytes, bit=3), keys={NAMES[2]}, times=1)
    store.batch_set(SPACE, KEYS, PAGES)
    assert get(store)[0] == [True, True, False, True]
    assert store.exists(SPACE, KEYS) == 2


@pytest.mark.parametrize("offset_bytes", [0, 63, 64, 263])
def test_a_bit_flipped_on_the_way_out_is_a_miss_and_the_good_page_stays(
    faulty, store, offset_bytes
):
    faulty.inject("batch_get", FlipBit(offset_bytes), keys={NAMES[2]}, times=1)
    assert get(store)[0] == [True, True, False, True]
    assert get(store) == ([True] * 4, PAGES)


@pytest.mark.parametrize("answer", [False, True])
def test_half_filled_buffers_are_a_miss_whatever_the_backend_says(faulty, store, answer):
    store.batch_set(SPACE, KEYS, [b"\x07" * 200] * 4)
    faulty.inject("batch_get", HalfFill(answer), keys={NAMES[1]}, times=1)
    hits, buffers = get(store)
    assert hits == [True, False, True, True]
    assert buffers[1] == b"\x07" * 68 + bytes(132)  # half of 264 bytes, 64 of them the header


@pytest.mark.parametrize("hook", ["batch_set", "batch_get", "delete"])
@pytest.mark.parametrize("fault", [ShortResult(), NoneResult()])
def test_answers_of_a_wrong_shape_are_violations_of_the_contract(faulty, store, hook, fault):
    faulty.inject(hook, fault)
    calls = {
        "batch_set": lambda: store.batch_set(SPACE, KEYS, PAGES),
        "batch_get": lambda: get(store),
        "delete": lambda: store.delete(SPACE, KEYS),
    }
    with pytest.raises(ContractViolation, match=f"{hook} must return a list of 4 bools"):
        calls[hook]()


def test_no_answer_at_all_to_exists_and_usage_is_a_violation(faulty, store):
    faulty.inject("exists", NoneResult())
    faulty.inject("usage", NoneResult())
    with pytest.raises(ContractViolation, match="exists must return"):
        store.exists(SPACE, KEYS)
    with pytest.raises(ContractViolation, match="usage must return"):
        store.usage()


def test_every_nth_key_can_be_struck(faulty, store):
    injection = faulty.inject("batch_get", Refuse(), skip=1, every=2)
    assert get(store)[0] == [True, False, True, False]
    assert injection.hits == 2
    faulty.heal()
    assert get(store)[0] == [True] * 4


def test_a_fault_that_a_hook_cannot_have_is_refused(faulty):
    with pytest.raises(ConfigError, match="there is no hook 'batch_put'"):
        faulty.inject("batch_put", Refuse())
    with pytest.raises(ConfigError, match="HalfFill strikes batch_get, not 'batch_set'"):
        faulty.inject("batch_set", HalfFill())


def test_a_counting_backend_counts_calls_keys_tags_and_bytes():
    counting = CountingBackend(MemoryBackend(MemoryConfig()))
    with Store(counting) as store:
        drafts = [f"d:{key}" for key in KEYS[:3]]
        store.batch_set(SPACE, drafts, PAGES[:3])
        store.batch_set(SPACE, KEYS, PAGES)
        counting_keys = dict(counting.keys)
        get(store)
        store.batch_get(SPACE, [KEYS[0], "f" * 64], [bytearray(200), bytearray(200)])
        store.exists(SPACE, KEYS)
        assert counting_keys == {"batch_set": 1 + 3 + 4}
        assert counting.calls == {"batch_set": 3, "batch_get": 2, "exists": 1}
        assert counting.tags["batch_set", "d"] == 3
        assert counting.tags["batch_set", ""] == 4
        assert counting.tags["batch_set", "n"] == 1
        assert counting.set_bytes == 7 * 264 + 64 + 4096
        assert counting.get_bytes == 5 * 264
        counting.reset()
        assert not counting.calls
        assert counting.set_bytes == 0


@pytest.mark.parametrize("double", [FaultyBackend, CountingBackend])
def test_doubles_have_batches_whole_whatever_the_backend_would_do_with_them(double):
    backend = RecordingBackend()
    backend.call_pages = 1
    with Store(double(backend)) as store:
        store.open()
        assert all(store.batch_set(SPACE, KEYS, PAGES))
        assert all(store.batch_get(SPACE, KEYS, [bytearray(200) for _ in KEYS]))
    assert backend.requests("batch_set") == backend.requests("batch_get") == [KEYS]


def test_doubles_go_round_one_another():
    faulty = FaultyBackend(MemoryBackend(MemoryConfig()))
    with Store(CountingBackend(faulty)) as store:
        assert isinstance(SPACE, Namespace)
        faulty.inject("batch_set", Refuse())
        assert store.batch_set(SPACE, KEYS, PAGES) == [False] * 4
