"""Every clause fails for a backend that breaks it, and for one that doesn't it holds."""

import threading
from importlib import metadata

import pytest
from testing import broken_backends, leaky_backend
from testing.breaking import BREAKS

from hicache_storage import PairedStore, hookimpl
from hicache_storage.keys import draft_key, tagged_key
from hicache_storage.pairing import PairCount, leading_run
from hicache_storage.testing.clause import ClauseFailed
from hicache_storage.testing.clauses import CLAUSES, pairs
from hicache_storage.testing.running import probe, run_clause, unmet
from hicache_storage.testing.subject import Subject

CLAUSE = {clause.number: clause for clause in CLAUSES}
OPENER = "testing.broken_backends:open_broken"


def subject_of(fault, tmp_path):
    return Subject(
        {"fault": fault, "inner": str(tmp_path / "pages")}, OPENER, private=True, empty=True
    )


@pytest.mark.parametrize(("fault", "number"), BREAKS, ids=[f"{n}-{f}" for f, n in BREAKS])
def test_a_clause_fails_for_a_backend_that_breaks_it(fault, number, tmp_path):
    subject = subject_of(fault, tmp_path)
    assert unmet(CLAUSE[number], probe(subject)) == ""
    with pytest.raises(ClauseFailed):
        run_clause(CLAUSE[number], subject, timeout_s=60)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.number)
def test_a_clause_holds_for_the_reference(clause, tmp_path):
    subject = subject_of("BreaksNothing", tmp_path)
    reason = unmet(clause, probe(subject))
    if not reason:
        run_clause(clause, subject, timeout_s=60)
    assert not reason or clause.number in ("2.7", "7.3", "7.4", "8.6", "9.1", "9.6", "10.1")


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.number)
def test_a_clause_holds_for_a_store_that_one_process_at_a_time_may_open(clause, tmp_path):
    subject = subject_of("OneProcessAtATime", tmp_path)
    if not unmet(clause, probe(subject)):
        run_clause(clause, subject, timeout_s=60)
    else:
        assert clause.number in [
            "4.5",
            "7.3",
            "7.4",
            "8.1",
            "8.2",
            "8.3",
            "8.4",
            "8.5",
            "8.6",
            "9.6",
            "10.1",
        ]


# -- rules that Store and PairedStore keep, not the backend ------------------------------------


@pytest.mark.parametrize("number", ["4.2", "4.3", "4.4"])
def test_the_clauses_on_damage_fail_without_the_header_check(number, tmp_path, monkeypatch):
    monkeypatch.setattr("hicache_storage.store.check_page", lambda *arguments: None)
    with pytest.raises(ClauseFailed, match=r"taken for a good page|another namespace"):
        run_clause(CLAUSE[number], subject_of("BreaksNothing", tmp_path))


class BareHash(PairedStore):
    """Stores drafts without the tag."""

    def batch_set(self, hashes, target_pages, draft_pages=None, prefix_hashes=None):
        if self.draft is not None and draft_pages is not None:
            self.store.batch_set(self.draft, hashes, draft_pages)
        return super().batch_set(hashes, target_pages, draft_pages, prefix_hashes)


class TargetFirst(PairedStore):
    def batch_set(self, hashes, target_pages, draft_pages=None, prefix_hashes=None):
        self.store.batch_set(self.target, hashes, target_pages)
        return super().batch_set(hashes, target_pages, draft_pages, prefix_hashes)


class OldBytesStay(PairedStore):
    """Gives the engine buffers of lost drafts as they were."""

    def batch_get(self, hashes, target_buffers, draft_buffers=None, prefix_hashes=None):
        before = [bytes(buffer) for buffer in draft_buffers or ()]
        found = super().batch_get(hashes, target_buffers, draft_buffers, prefix_hashes)
        for hit, old, buffer in zip(found.draft or (), before, draft_buffers or (), strict=True):
            if not hit:
                buffer[:] = old
        return found


class LostDraftCostsTheTarget(PairedStore):
    def batch_get(self, hashes, target_buffers, draft_buffers=None, prefix_hashes=None):
        found = super().batch_get(hashes, target_buffers, draft_buffers, prefix_hashes)
        run = leading_run(found.draft) if found.draft is not None else len(hashes)
        found.target[run:] = [False] * (len(hashes) - run)
        return found


class TargetAloneCounts(PairedStore):
    def exists(self, hashes, prefix_hashes=None):
        run = self.store.exists(self.target, hashes)
        return PairCount(run, run, run)


class DraftAloneCounts(PairedStore):
    def exists(self, hashes, prefix_hashes=None):
        run = self.store.exists(self.draft, [draft_key(one) for one in hashes])
        return PairCount(run, run, run)


class OneNamespaceForEveryDraft(PairedStore):
    """Names drafts by their hash alone, whatever model they are of."""

    space = None

    def __init__(self, store, target, draft=None, **options):
        if draft is not None:
            OneNamespaceForEveryDraft.space = OneNamespaceForEveryDraft.space or draft
            if draft.page_bytes == self.space.page_bytes:
                draft = self.space
        super().__init__(store, target, draft, **options)


class AsksForDraftsAnyway(PairedStore):
    def exists(self, hashes, prefix_hashes=None):
        self.store.exists(self.target, [tagged_key("d", one) for one in hashes])
        return super().exists(hashes, prefix_hashes)


PAIRS_BREAK = [
    (BareHash, "11.1"),
    (TargetFirst, "11.2"),
    (OldBytesStay, "11.3"),
    (LostDraftCostsTheTarget, "11.3"),
    (TargetAloneCounts, "11.4"),
    (DraftAloneCounts, "11.5"),
    (OneNamespaceForEveryDraft, "11.6"),
    (AsksForDraftsAnyway, "11.7"),
]


@pytest.mark.parametrize(
    ("cls", "number"), PAIRS_BREAK, ids=lambda one: getattr(one, "__name__", one)
)
def test_the_clauses_on_pairs_fail_for_a_store_that_breaks_them(cls, number, tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "PairedStore", cls)
    with pytest.raises(ClauseFailed):
        run_clause(CLAUSE[number], subject_of("BreaksNothing", tmp_path))


@pytest.fixture
def leaky(monkeypatch):
    """A backend `leaky` that is found by name and shows its password."""
    entry_point = metadata.EntryPoint(
        "leaky", "testing.leaky_backend:LeakyBackend", "hicache_storage.backends"
    )
    monkeypatch.setattr(
        "hicache_storage.discovery.metadata.entry_points", lambda group: [entry_point]
    )
    return Subject("leaky://?password=hunter2-very-secret", private=True, empty=True)


def test_the_clause_on_secrets_fails_for_a_backend_that_shows_one(leaky):
    assert unmet(CLAUSE["10.1"], probe(leaky)) == ""
    with pytest.raises(ClauseFailed, match="shows the secret option 'password'"):
        run_clause(CLAUSE["10.1"], leaky)


def test_the_clause_on_secrets_holds_once_it_does_not(leaky, monkeypatch):
    monkeypatch.setattr("testing.leaky_backend.LeakyBackend.__repr__", object.__repr__)
    run_clause(CLAUSE["10.1"], leaky)


def test_the_clause_on_secrets_fails_for_an_error_that_shows_a_wrong_one(leaky, monkeypatch):
    monkeypatch.setattr(leaky_backend.LeakyBackend, "__repr__", object.__repr__)
    reading = leaky_backend.LeakyBackend.batch_get

    @hookimpl
    def refuses_the_wrong_one(self, keys, buffers):
        if self.password.text != "hunter2-very-secret":
            raise PermissionError(f"{self.password.text} is not the password")
        return reading(self, keys, buffers)

    monkeypatch.setattr(leaky_backend.LeakyBackend, "batch_get", refuses_the_wrong_one)
    with pytest.raises(ClauseFailed, match="an error about a wrong password shows"):
        run_clause(CLAUSE["10.1"], leaky)


@pytest.mark.parametrize("harm", ["descriptor", "thread"])
def test_the_clause_on_constructors_fails_for_one_that_does_more(leaky, monkeypatch, harm):
    run_clause(CLAUSE["9.6"], leaky)
    making = leaky_backend.LeakyBackend.__init__
    left = []

    def does_more(self, config):
        making(self, config)
        if harm == "descriptor":
            left.append(open("/dev/null"))  # noqa: SIM115
        else:
            event = threading.Event()
            threading.Thread(target=event.wait, args=(20,), daemon=True).start()
            left.append(event)

    monkeypatch.setattr(leaky_backend.LeakyBackend, "__init__", does_more)
    with pytest.raises(ClauseFailed, match="constructing a backend"):
        run_clause(CLAUSE["9.6"], leaky)
    for one in left:
        one.close() if harm == "descriptor" else one.set()


def test_each_clause_is_broken_by_some_test():
    broken = {number for _, number in BREAKS} | {number for _, number in PAIRS_BREAK}
    broken |= {"4.2", "4.3", "4.4", "9.6", "10.1"}
    assert sorted(broken, key=lambda n: CLAUSE[n].order) == [one.number for one in CLAUSES]


def test_a_backend_that_hangs_fails_with_the_place_where_it_stands(tmp_path):
    with pytest.raises(ClauseFailed, match=r"(?s)within 0.5 s.*broken_backends.*batch_get"):
        run_clause(CLAUSE["1.1"], subject_of("Hangs", tmp_path), timeout_s=0.5)


def test_a_deviation_must_be_of_a_real_clause_and_have_a_reason():
    from hicache_storage.testing.running import check_deviations

    check_deviations({"1.1": "the store is eventually consistent"})
    with pytest.raises(ValueError, match=r"'99\.1'.*no such clause"):
        check_deviations({"99.1": "why"})
    with pytest.raises(ValueError, match="give the reason"):
        check_deviations({"1.1": "  "})


def test_pages_left_behind_are_counted_where_the_backend_cannot_delete(tmp_path, monkeypatch):
    monkeypatch.setattr(broken_backends.CannotDelete, "__init__", _shared_init)
    _, left = run_clause(CLAUSE["1.1"], subject_of("CannotDelete", tmp_path))
    assert left == 50
    _, left = run_clause(CLAUSE["1.1"], subject_of("BreaksNothing", tmp_path))
    assert left == 0


def _shared_init(self, inner):
    broken_backends.Around.__init__(self, inner)
    self.scope = "exclusive"
