"""Backends are found by name; a broken or doubtful one never gets in the way of another."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from distributions import GOOD, GROUP, install

from hicache_storage import (
    ConfigError,
    ContractViolation,
    Store,
    UnknownBackendError,
    open_store,
)
from hicache_storage.backends.memory import MemoryBackend
from hicache_storage.discovery import EXTRAS, build_backend, find_backends, load_backend
from hicache_storage.testing.bench import kit_namespace

BUILT_IN = {"memory", "file", "lmdb", "s3", "tier"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on sys.path; what is installed there is found, and forgotten afterwards."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def second_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another one, before the first."""
    path = tmp_path / "second"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    return path


def test_built_in_backends_come_in_by_the_same_door() -> None:
    found = find_backends()
    assert found.keys() >= BUILT_IN
    assert all(found[name].built_in for name in BUILT_IN)
    assert load_backend("memory") is MemoryBackend


def test_a_plugin_is_found_with_its_package_and_opens_by_name(site: Path) -> None:
    install(site, "plug-a", {"plug": "plug_a:Backend"}, {"plug_a": GOOD}, version="2.5")
    one = find_backends()["plug"]
    assert (one.distribution, one.version, one.built_in) == ("plug-a", "2.5", False)
    with open_store("plug://") as store:
        assert store.name == "plug"


def test_finding_loads_nothing(site: Path) -> None:
    install(site, "plug-a", {"plug": "plug_a:Backend"}, {"plug_a": "raise SystemExit('loaded')"})
    assert "plug" in find_backends()


# -- a broken plugin ---------------------------------------------------------------------------

BROKEN = {
    "ImportError": "raise ImportError('deep inside')",
    "SystemExit": "raise SystemExit(3)",
    "KeyboardInterrupt": "raise KeyboardInterrupt('at import')",
    "SyntaxError": "def f(:",
    "ZeroDivisionError": "1 / 0",
    "AttributeError": "Other = 1",
    "ModuleNotFoundError": "import a_module_that_is_not_there",
    "RecursionError": "def f(): f()\nf()",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_raises_its_own_error_when_asked_for_and_hinders_no_other(
    site: Path, kind: str
) -> None:
    install(site, "bad-one", {"bad": "bad_one:Backend"}, {"bad_one": BROKEN[kind]})
    install(site, "good-one", {"good": "good_one:Backend"}, {"good_one": GOOD})
    with pytest.raises(BaseException) as caught:  # noqa: PT011  (also SystemExit)
        load_backend("bad")
    assert type(caught.value).__name__ == kind
    if kind != "AttributeError":
        shown = "".join(traceback.format_exception(caught.value))
        assert "bad_one.py" in shown
    assert load_backend("good").__module__ == "good_one"
    open_store("memory://").close()


@pytest.mark.parametrize("value", ["thing = 1", "def thing(): pass", "thing = object()"])
def test_an_entry_point_that_is_no_class_is_a_violation_that_names_it(
    site: Path, value: str
) -> None:
    install(site, "plug-a", {"plug": "plug_a:thing"}, {"plug_a": value})
    with pytest.raises(ContractViolation, match=r"'plug' of plug-a \(plug_a:thing\) must be a cl"):
        load_backend("plug")


@pytest.mark.parametrize("name", ["MyStore", "my_store", "9store", "my store", "stör"])
def test_a_name_that_cannot_stand_in_a_url_is_a_violation(site: Path, name: str) -> None:
    install(site, "plug-a", {name: "plug_a:Backend"}, {"plug_a": GOOD})
    with pytest.raises(ContractViolation, match="must be usable in a URL"):
        load_backend(name)


# -- a missing client library ------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(EXTRAS))
def test_a_missing_client_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Whether the backend imports it when it is loaded or when it is opened."""
    _forget(monkeypatch, name)
    monkeypatch.setitem(sys.modules, EXTRAS[name], None)
    url = {"s3": "s3://bucket/prefix?endpoint=http://127.0.0.1:9"}.get(name, f"{name}://{tmp_path}")
    with pytest.raises(
        ConfigError, match=rf"'{name}' needs .*pip install 'hicache-storage\[{name}\]'"
    ):
        open_store(url)


@pytest.mark.parametrize("name", sorted(EXTRAS))
@pytest.mark.parametrize(
    "source",
    [
        "raise ImportError('libssl is too old')",
        "import a_dependency_of_the_client",
        "from {client}.sub import nothing",
        "raise RuntimeError('no entropy')",
    ],
)
def test_a_client_library_that_is_there_and_broken_shows_its_own_error(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, source: str
) -> None:
    client = EXTRAS[name]
    (site / f"{client}.py").write_text(source.format(client=client))
    _forget(monkeypatch, name)
    url = {"s3": "s3://bucket/prefix?endpoint=http://127.0.0.1:9"}.get(name, f"{name}://{tmp_path}")
    with pytest.raises(Exception, match=r"libssl|a_dependency|\.sub|entropy") as caught:
        open_store(url)
    assert "pip install" not in str(caught.value)


def _forget(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes the backend and its client be imported anew, and puts them back afterwards."""
    client = EXTRAS[name]
    for module in list(sys.modules):
        if module.startswith((f"hicache_storage.backends.{name}", client, "botocore")):
            monkeypatch.delitem(sys.modules, module)


# -- unknown names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memoy", r"Did you mean 'memory'"),
        ("File", r"Did you mean 'file'"),
        ("S3", r"Did you mean 's3'"),
        ("fsspec", r"pip install hicache-storage-fsspec"),
        ("redis", r"pip install hicache-storage-redis"),
        ("xyz", r"no backend is called 'xyz'\. Installed: "),
    ],
)
def test_an_unknown_name_lists_what_there_is_and_says_how_to_get_it(name: str, words: str) -> None:
    own = {n: found for n, found in find_backends().items() if found.built_in}
    with pytest.raises(UnknownBackendError, match=words) as caught:
        load_backend(name, own)
    message = str(caught.value)
    assert "memory (hicache-storage 0." in message
    assert "reinstall it (stale metadata of an older install hides it)" in message


def test_stale_metadata_that_hides_a_plugin_is_told_by_the_error(
    site: Path, second_site: Path
) -> None:
    """Two installs of one package, the first from before it had entry points."""
    install(site, "plug-a", {"plug": "plug_a:Backend"}, {"plug_a": GOOD}, version="2.0")
    assert "plug" in find_backends()
    install(second_site, "plug-a", {}, version="1.0", entry_points=False)
    assert "plug" not in find_backends()
    with pytest.raises(UnknownBackendError, match="stale metadata of an older install hides it"):
        open_store("plug://")


# -- several claims to a name ------------------------------------------------------------------


def entry_point(name: str, value: str, distribution: str | None) -> metadata.EntryPoint:
    one = metadata.EntryPoint(name, value, GROUP)
    if distribution is not None:
        path = type("Fake", (metadata.Distribution,), {"read_text": None, "locate_file": None})
        fake = path.__new__(path)
        path.metadata = property(lambda self: {"Name": distribution, "Version": "1"})  # type: ignore[misc,assignment]
        one = one._for(fake)  # type: ignore[attr-defined]
    return one


def test_the_same_entry_point_met_twice_is_one() -> None:
    twice = [entry_point("plug", "plug_a:Backend", "plug-a") for _ in range(2)]
    found = find_backends(twice)
    assert list(found) == ["plug"]
    assert found["plug"].rivals == ()


def test_a_package_found_twice_on_the_path_counts_once(site: Path, second_site: Path) -> None:
    for place in (site, second_site):
        install(place, "plug-a", {"plug": "plug_a:Backend"}, {"plug_a": GOOD})
    assert find_backends()["plug"].rivals == ()
    open_store("plug://").close()


def test_two_packages_that_claim_a_name_are_both_named_and_neither_is_used(site: Path) -> None:
    install(site, "plug-a", {"plug": "plug_a:Backend", "a": "plug_a:Backend"}, {"plug_a": GOOD})
    install(site, "plug-b", {"plug": "plug_b:Backend", "b": "plug_b:Backend"}, {"plug_b": GOOD})
    with pytest.raises(ConfigError, match=r"plug-a .*plug-b .*uninstall all but one"):
        load_backend("plug")
    open_store("a://").close()
    open_store("b://").close()


def test_a_built_in_name_stays_built_in(site: Path) -> None:
    install(site, "a-rival", {"memory": "rival:Backend"}, {"rival": GOOD})
    found = find_backends()
    assert found["memory"].built_in
    assert found["memory"].rivals == ("a-rival (rival:Backend)",)
    assert load_backend("memory") is MemoryBackend


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_what_comes_after_a_duplicate_is_found_in_any_order(order: tuple[int, ...]) -> None:
    claims = [
        entry_point("a", "one:Backend", "plug-a"),
        entry_point("a", "two:Backend", "plug-b"),
        entry_point("b", "three:Backend", "plug-b"),
    ]
    found = find_backends([claims[i] for i in order])
    assert list(found) == ["a", "b"]
    assert found["a"].distribution == "plug-a"
    assert found["a"].rivals == ("plug-b (two:Backend)",)
    assert found["b"].rivals == ()


def test_an_entry_point_without_a_package_is_found_too() -> None:
    found = find_backends([entry_point("plug", "plug_a:Backend", None)])
    assert (found["plug"].distribution, found["plug"].version) == ("unknown", "?")


# -- a call reaches the chosen backend alone ---------------------------------------------------

LOUD = """
    from hicache_storage import hookimpl

    calls = []

    class Backend:
        @hookimpl
        def batch_set(self, keys):
            calls.append("{name}")
            {harm}

        @hookimpl
        def batch_get(self, keys):
            calls.append("{name}")
            {harm}

        @hookimpl
        def exists(self, keys):
            calls.append("{name}")
            {harm}
"""


@pytest.mark.parametrize("harm", ["raise RuntimeError('other')", "return []", "return None"])
def test_a_call_reaches_the_chosen_backend_and_no_other(site: Path, harm: str) -> None:
    other = LOUD.format(name="other", harm=harm)
    install(site, "plug-other", {"other": "plug_other:Backend"}, {"plug_other": other})
    namespace = kit_namespace(8, "a")
    keys = ["0" * 64]
    with open_store("memory://") as memory:
        store = Store(load_backend("other")(), name="other")
        assert memory.batch_set(namespace, keys, [b"12345678"]) == [True]
        assert memory.exists(namespace, keys) == 1
        assert importlib.import_module("plug_other").calls == []
        with pytest.raises(Exception, match="'other'"):
            store.exists(namespace, keys)
        assert set(importlib.import_module("plug_other").calls) == {"other"}


# -- constructors ------------------------------------------------------------------------------


class Config:
    pass


class TakesConfig:
    Config = Config

    def __init__(self, config: Config) -> None:
        self.config = config


class TakesConfigAndMore(TakesConfig):
    def __init__(self, config: Config, **more: object) -> None:
        super().__init__(config)
        self.more = more


class TakesNothing:
    pass


class ForgetsTheConfig:
    Config = Config

    def __init__(self) -> None:
        pass


class WantsTooMuch:
    Config = Config

    def __init__(self, config: Config, client: object) -> None:
        pass


class WantsConfigWithoutConfig:
    def __init__(self, config: Config) -> None:
        pass


class FailsInside(TakesConfig):
    def __init__(self, config: Config) -> None:
        raise TypeError("from inside")


def test_a_constructor_takes_the_config_or_nothing() -> None:
    config = Config()
    built = build_backend("x", TakesConfig, config)
    assert isinstance(built, TakesConfig)
    assert built.config is config
    more = build_backend("x", TakesConfigAndMore, config)
    assert isinstance(more, TakesConfigAndMore)
    assert more.more == {}
    assert isinstance(build_backend("x", TakesNothing, None), TakesNothing)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (ForgetsTheConfig, r"\(self, config\)"),
        (WantsTooMuch, r"\(self, config\)"),
        (WantsConfigWithoutConfig, r"\(self\), since it has no Config"),
    ],
)
def test_another_constructor_is_a_violation_with_the_expected_signature(
    cls: type, expected: str
) -> None:
    with pytest.raises(
        ContractViolation, match=rf"'x': {cls.__name__}.__init__ must take {expected}"
    ):
        build_backend("x", cls, Config())


def test_a_type_error_from_inside_a_constructor_is_its_own() -> None:
    with pytest.raises(TypeError, match="from inside") as caught:
        build_backend("x", FailsInside, Config())
    assert not isinstance(caught.value, ContractViolation)


def test_a_config_that_is_no_dataclass_is_a_violation(site: Path) -> None:
    source = GOOD + "\n        Config = dict\n"
    install(site, "plug-a", {"plug": "plug_a:Backend"}, {"plug_a": source})
    with pytest.raises(ContractViolation, match=r"'plug'.*Config must be a dataclass"):
        open_store("plug://")
