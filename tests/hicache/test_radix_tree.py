"""RadixTree: what a level gives up, and in which order."""

from __future__ import annotations

import pytest
from hicache.rig import branch, chain
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage import InvalidKey
from hicache_storage.hicache.radix_tree import PageNode, RadixTree


def grow(tree: RadixTree, hashes: list[str], *, level: str = "device") -> list[PageNode]:
    """Adds the pages that the tree lacks, numbered in the order of their coming."""
    nodes = tree.path(hashes)
    for page_hash in hashes[len(nodes) :]:
        parent = nodes[-1] if nodes else tree.root
        node = tree.add(parent, page_hash, **{level: len(tree)})
        nodes.append(node)
    tree.touch(nodes)
    return nodes


def give_up(tree: RadixTree) -> list[PageNode]:
    """All device leaves in the order in which they go."""
    gone = []
    while (node := tree.pop_device_leaf()) is not None:
        tree.drop_device(node)
        gone.append(node)
    return gone


def test_a_match_is_the_longest_prefix_and_stops_at_the_first_gap() -> None:
    tree, hashes = RadixTree(), chain(4)
    nodes = grow(tree, hashes[:3])
    assert tree.match(hashes) == nodes
    assert tree.match(hashes[1:]) == []
    assert tree.match([hashes[0], hashes[2]]) == nodes[:1]
    assert tree.match([]) == []


@pytest.mark.parametrize("level", ["device", "host"])
def test_leaves_go_first_and_the_least_recently_used_of_them(level: str) -> None:
    tree, trunk = RadixTree(), chain(2)
    old, new = branch(trunk, 2, "old"), branch(trunk, 2, "new")
    for hashes in (new, old, new):
        grow(tree, hashes, level=level)
    pop, drop = (
        (tree.pop_device_leaf, tree.drop_device)
        if level == "device"
        else (tree.pop_host_leaf, tree.drop_host)
    )
    gone = []
    while (node := pop()) is not None:
        drop(node)
        gone.append(node.hash)
    assert gone == [old[3], old[2], new[3], new[2], trunk[1], trunk[0]]
    assert len(tree) == 0


@pytest.mark.parametrize("level", ["device", "host"])
def test_a_locked_page_and_all_before_it_stay(level: str) -> None:
    tree = RadixTree()
    nodes = grow(tree, chain(4), level=level)
    lock, unlock, pop, drop = (
        (tree.lock_device, tree.unlock_device, tree.pop_device_leaf, tree.drop_device)
        if level == "device"
        else (tree.lock_host, tree.unlock_host, tree.pop_host_leaf, tree.drop_host)
    )
    lock(nodes[2])
    lock(nodes[2])
    last = pop()
    assert last is nodes[3]
    drop(last)
    assert pop() is None
    unlock(nodes[2])
    assert pop() is None
    unlock(nodes[2])
    assert pop() is nodes[2]


def test_a_node_lives_as_long_as_one_level_has_its_page() -> None:
    tree = RadixTree()
    (node,) = grow(tree, chain(1))
    tree.set_host(node, 7, True)
    tree.drop_device(node)
    assert tree.holds(node)
    assert (node.device, node.host, node.draft_on_host) == (None, 7, True)
    assert not tree.owns_device(0)
    tree.drop_host(node)
    assert not tree.holds(node)
    assert tree.match(chain(1)) == []


def test_a_page_with_others_behind_it_never_leaves_a_hole() -> None:
    tree = RadixTree()
    nodes = grow(tree, chain(2))
    tree.set_host(nodes[1], 0, True)
    tree.drop_device(nodes[1])
    with pytest.raises(RuntimeError, match="without a prefix"):
        tree.drop_device(nodes[0])


def test_a_leaf_that_was_given_back_is_offered_again() -> None:
    tree = RadixTree()
    (node,) = grow(tree, chain(1))
    assert tree.pop_device_leaf() is node
    assert tree.pop_device_leaf() is None
    tree.offer([node])
    assert tree.pop_device_leaf() is node


@pytest.mark.parametrize(
    "hashes",
    [
        pytest.param([chain(2)[1]], id="a later page as a first one"),
        pytest.param([*chain(1, "other"), chain(2)[1]], id="a page behind another prefix"),
        pytest.param([*chain(2), *["f" * 64] * 2], id="one hash twice"),
        pytest.param([*chain(2), chain(2)[0]], id="a page behind itself"),
    ],
)
def test_hashes_that_are_not_chained_are_refused_before_anything_changes(
    hashes: list[str],
) -> None:
    tree = RadixTree()
    grow(tree, chain(2))
    with pytest.raises(InvalidKey, match="chained"):
        tree.path(hashes)
    assert len(tree) == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=40))
def test_the_order_of_leaving_is_that_of_use_however_often_pages_are_used(
    uses: list[tuple[str, int]],
) -> None:
    tree = RadixTree()
    last: dict[str, int] = {}
    for tick, (name, count) in enumerate(uses):
        for node in grow(tree, chain(count, name)):
            last[node.hash] = tick
    gone = give_up(tree)
    assert {node.hash for node in gone} == set(last)
    place = {node.hash: i for i, node in enumerate(gone)}
    for node in gone:
        if node.parent is not tree.root:
            assert place[node.hash] < place[node.parent.hash]
    leaves = [[h for h in chain(4, name) if h in last][-1] for name in {n for n, _ in uses}]
    assert sorted(leaves, key=last.__getitem__) == sorted(leaves, key=place.__getitem__)


def test_a_page_used_often_keeps_the_queue_of_leaves_short() -> None:
    tree = RadixTree()
    nodes = grow(tree, chain(3))
    for _ in range(10_000):
        tree.touch(nodes)
    assert len(tree._device_leaves._heap) <= 4 * len(tree) + 64
    assert len(give_up(tree)) == 3
