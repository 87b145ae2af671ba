"""BackendContract: its clauses can't be changed, only deviated from, with a reason that shows."""

import textwrap

import pytest

from hicache_storage.testing import BackendContract
from hicache_storage.testing.clauses import CLAUSES
from hicache_storage.testing.contract import SEALED

pytest_plugins = ["pytester"]

NAME = next(clause.test_name for clause in CLAUSES if clause.number == "1.3")
REFUSED = rf"TestMine overrides or removes clause 1\.3 \({NAME}\).*deviations = "
HEAD = "from hicache_storage.testing import BackendContract\nimport pytest\n"


def run(pytester, text, *arguments):
    pytester.makepyfile(HEAD + text)
    return pytester.runpytest("-p", "no:cacheprovider", *arguments)


@pytest.mark.parametrize(
    "value",
    [lambda self: None, None, property(lambda self: None), 0],
    ids=["function", "none", "property", "number"],
)
def test_a_suite_that_overrides_a_clause_is_refused(value):
    with pytest.raises(TypeError, match=REFUSED):
        type(BackendContract)("TestMine", (BackendContract,), {NAME: value})


def test_a_mixin_cannot_override_a_clause():
    mixin = type("Mixin", (), {NAME: lambda self: None})
    with pytest.raises(TypeError, match=REFUSED):
        type(BackendContract)("TestMine", (mixin, BackendContract), {})


def test_a_suite_of_a_suite_cannot_override_a_clause():
    class Between(BackendContract):
        def __init_subclass__(cls):
            pass

    with pytest.raises(TypeError, match=REFUSED):
        type(BackendContract)("TestMine", (Between,), {NAME: None})


@pytest.mark.parametrize("on", ["the suite", "the base"])
def test_a_clause_cannot_be_replaced_or_deleted_later(on):
    class TestMine(BackendContract):
        pass

    cls = TestMine if on == "the suite" else BackendContract
    with pytest.raises(TypeError, match="overrides or removes clause"):
        setattr(cls, NAME, lambda self: None)
    with pytest.raises(TypeError, match="overrides or removes clause"):
        delattr(cls, NAME)


def test_the_subject_of_a_suite_cannot_be_overridden():
    with pytest.raises(TypeError, match="overrides or removes subject, which the clauses rely on"):
        type(BackendContract)("TestMine", (BackendContract,), {"subject": None})


def test_every_clause_is_a_test():
    assert {f"test_{clause.number.replace('.', '_')}" for clause in CLAUSES} == {
        "_".join(name.split("_")[:3]) for name in SEALED if name != "subject"
    }


def test_an_override_is_a_collection_error_that_names_the_clause(pytester):
    result = run(
        pytester,
        f"class TestMine(BackendContract):\n    url = 'memory://'\n    def {NAME}(self): pass\n",
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*TypeError: TestMine overrides or removes clause 1.3*"])


def test_a_deviation_that_still_fails_is_an_expected_failure_and_is_printed(pytester):
    pytester.makepyfile(
        spoils="""
        from hicache_storage import hookimpl
        from hicache_storage.backends.memory import MemoryBackend

        class Spoils(MemoryBackend):
            @hookimpl
            def batch_get(self, keys, buffers):
                hits = [self._get(key, spans) for key, spans in zip(keys, buffers)]
                return hits if all(hits) else [False] * len(hits)
        """
    )
    pytester.syspathinsert()
    text = """
        from importlib import metadata

        @pytest.fixture(autouse=True)
        def spoils(monkeypatch):
            one = metadata.EntryPoint("spoils", "spoils:Spoils", "hicache_storage.backends")
            place = "hicache_storage.discovery.metadata.entry_points"
            monkeypatch.setattr(place, lambda group: [one])

        class TestMine(BackendContract):
            url = "spoils://"
            deviations = {"1.3": "the service answers for a batch as a whole", "2.4": "not so"}
    """
    result = run(pytester, textwrap.dedent(text), "-k", "test_1_3_ or test_2_4_ or test_1_1_")
    result.assert_outcomes(failed=2, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*XPASS(strict)*",
            "*backend contract*",
            "*::TestMine: 0 passed, 2 failed, 1 deviate as declared, 0 not selected",
            "  deviates from 1.3: the service answers for a batch as a whole",
        ]
    )


def test_a_deviation_does_not_cover_a_store_that_cannot_be_opened(pytester):
    result = run(
        pytester,
        "class TestMine(BackendContract):\n    url = 'nosuch://'\n"
        "    deviations = {'1.1': 'why'}\n",
        "-k",
        "test_1_1_",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*UnknownBackendError*"])


@pytest.mark.parametrize(
    ("deviations", "message"),
    [("{'99.9': 'why'}", "there is no such clause"), ("{'1.1': ''}", "give the reason as text")],
)
def test_a_deviation_must_be_of_a_clause_and_have_a_reason(pytester, deviations, message):
    result = run(
        pytester,
        f"class TestMine(BackendContract):\n    url = 'memory://'\n    deviations = {deviations}\n",
    )
    result.stdout.fnmatch_lines([f"*TypeError: TestMine: *{message}*"])


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.xfail\nclass TestMine(BackendContract):\n    url = 'memory://'\n",
        "pytestmark = pytest.mark.xfail(strict=False)\n"
        "class TestMine(BackendContract):\n    url = 'memory://'\n",
    ],
    ids=["class", "module"],
)
def test_no_mark_softens_a_clause(pytester, text):
    result = run(pytester, text)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*clause 1.1 is marked xfail*deviations = *"])


def test_no_conftest_marks_a_single_clause_to_be_skipped(pytester):
    pytester.makeconftest(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    items[3].add_marker(pytest.mark.skip)\n"
    )
    result = run(pytester, "class TestMine(BackendContract):\n    url = 'memory://'\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*is marked skip*"])


def test_a_whole_suite_may_be_skipped_where_its_server_is_missing(pytester):
    result = run(
        pytester,
        "@pytest.mark.skipif(True, reason='no server')\n"
        "class TestMine(BackendContract):\n    url = 'memory://'\n",
    )
    result.assert_outcomes(skipped=len(CLAUSES))


def test_a_suite_without_a_location_says_what_to_set(pytester):
    result = run(pytester, "class TestMine(BackendContract):\n    pass\n", "-k", "test_1_1_")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*TestMine must set url or define make(self, tmp_path)*"])


@pytest.mark.parametrize(
    "body",
    [
        "url = 'file://{tmp_path}/pages'",
        "url = {'backend': 'file', 'path': '{tmp_path}/pages'}",
        "make = lambda self, tmp_path: {'backend': 'file', 'path': tmp_path / 'pages'}",
        "where = pytest.fixture(lambda self, tmp_path: f'file://{tmp_path}')",
    ],
    ids=["url", "mapping", "make", "fixture"],
)
def test_the_location_is_a_url_a_mapping_a_method_or_a_fixture(pytester, body):
    text = f"class TestMine(BackendContract):\n    {body}\n"
    result = run(pytester, text, "-k", "test_1_1_ or test_7_4_")
    result.assert_outcomes(passed=2)


def test_what_is_not_selected_says_which_hook_or_trait_is_missing(pytester):
    result = run(
        pytester,
        "class TestMine(BackendContract):\n    url = 'memory://'\n",
        "-k",
        "test_2_7_",
        "-rs",
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*clause 2.7 not selected: needs a scope other than*"])
