"""Names of objects: made from prefix and key once, in the same way by every verb."""

from __future__ import annotations

from collections.abc import Callable

from backends.s3.misbehaving_server import MisbehavingServer
from backends.s3.rig import KEYS, NAMESPACE, Opened

Open = Callable[..., Opened]
FOUR = [0, 1, 2, 3]


def test_every_verb_puts_the_prefix_before_a_name_once(
    server: MisbehavingServer, opened: Open
) -> None:
    tagged = opened(server, prefix="deploy1/deploy1")
    tagged.fill(4)
    assert len(server.objects) >= 4
    for name in server.objects:
        assert name.startswith("deploy1/deploy1/")
        assert name.count("deploy1") == 2
    assert tagged.exists(FOUR) == 4
    assert tagged.get(FOUR) == [True] * 4
    pages = {one.key.partition("/")[2] for one in tagged.store.scan()}
    assert pages == {KEYS[i] for i in FOUR}
    assert tagged.store.usage().pages >= 4
    before = set(server.objects)
    tagged.fill(4)
    assert set(server.objects) == before
    assert tagged.store.delete(NAMESPACE, [KEYS[i] for i in FOUR]) == [True] * 4
    assert tagged.exists(FOUR) == 0
    assert not list(tagged.store.scan())


def test_prefixes_never_meet_also_if_one_begins_with_the_other(
    server: MisbehavingServer, opened: Open
) -> None:
    stores = [opened(server, prefix=prefix) for prefix in ("kv", "kv2", "kv/kv", "")]
    stores[0].fill(4)
    for other in stores[1:]:
        assert other.exists(FOUR) == 0
        assert other.get(FOUR) == [False] * 4
        other.fill(4)
    stores[0].store.clear()
    assert [store.exists(FOUR) for store in stores] == [0, 4, 4, 4]
