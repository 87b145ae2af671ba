"""RadixTree: which page lies where, one node a page.

A page hash is chained over everything before the page, so it names the whole prefix: the tree is
a dict from hash to node, and each node knows its parent. A node holds a device page, a host page
or both, as page indices. What always holds:

- every node has a page on at least one level, so the tree has no hole in the middle of a prefix;
- a node with a device page has a parent with a device page, or is a first page;
- a level gives up only leaves of that level, never one that is locked.

Plain ints, no tensors, no I/O. Not thread-safe: the scheduler thread alone touches it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from ..errors import InvalidKey


class PageNode:
    """One page of one prefix."""

    __slots__ = (
        "children",
        "device",
        "device_children",
        "device_locks",
        "draft_on_device",
        "draft_on_host",
        "draft_stored",
        "hash",
        "hits",
        "host",
        "host_children",
        "host_locks",
        "parent",
        "stored",
        "storing",
        "used",
    )

    def __init__(self, page_hash: str, parent: PageNode | None) -> None:
        self.hash = page_hash
        self.parent = parent
        """None for the root only."""
        self.device: int | None = None
        self.host: int | None = None
        self.draft_on_device = False
        """The device page's draft half is the draft of this hash, not a zeroed stand-in."""
        self.draft_on_host = False
        self.stored = False
        """The attached storage said that it holds the target page."""
        self.draft_stored = False
        self.storing = False
        """A backup to storage is under way."""
        self.hits = 0
        self.used = 0
        """Tick of the last use; larger is more recent."""
        self.device_locks = 0
        self.host_locks = 0
        self.children = 0
        self.device_children = 0
        self.host_children = 0

    def prefix(self) -> list[str]:
        """The hashes of the pages before this one, the first page's first."""
        found: list[str] = []
        node = self.parent
        while node is not None and node.parent is not None:
            found.append(node.hash)
            node = node.parent
        return found[::-1]

    def __repr__(self) -> str:
        return f"PageNode({self.hash[:12]}, device={self.device}, host={self.host})"


class RadixTree:
    """Nodes by page hash, with the order in which each level gives pages up."""

    def __init__(self) -> None:
        self.root = PageNode("", None)
        self._nodes: dict[str, PageNode] = {}
        self._device_pages: set[int] = set()
        self._tick = 0
        self._device_leaves = _Leaves(self, _device_leaf)
        self._host_leaves = _Leaves(self, _host_leaf)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PageNode]:
        return iter(self._nodes.values())

    def holds(self, node: PageNode) -> bool:
        """Whether `node` is still part of the tree (the root always is)."""
        return node is self.root or self._nodes.get(node.hash) is node

    def match(self, hashes: Sequence[str]) -> list[PageNode]:
        """The nodes of the longest prefix of `hashes` that the tree holds."""
        found: list[PageNode] = []
        parent = self.root
        for page_hash in hashes:
            node = self._nodes.get(page_hash)
            if node is None or node.parent is not parent:
                break
            found.append(node)
            parent = node
        return found

    def get(self, page_hash: str) -> PageNode | None:
        """The node of that hash, wherever it is."""
        return self._nodes.get(page_hash)

    def path(self, hashes: Sequence[str]) -> list[PageNode]:
        """As `match`, for hashes that are about to be added behind it.

        Raises InvalidKey if one of those already names a page of another prefix, or is given
        twice: chained hashes never do.
        """
        found = self.match(hashes)
        fresh = hashes[len(found) :]
        if len(set(fresh)) != len(fresh) or any(page_hash in self._nodes for page_hash in fresh):
            raise InvalidKey(
                f"a page hash after page {len(found)} stands in two places, here or in another "
                "prefix; page hashes must be chained over the whole prefix (keys.page_hashes)"
            )
        return found

    def owns_device(self, index: int) -> bool:
        """Whether the device page belongs to a node."""
        return index in self._device_pages

    def add(
        self,
        parent: PageNode,
        page_hash: str,
        *,
        device: int | None = None,
        host: int | None = None,
        draft: bool = False,
    ) -> PageNode:
        """A new child of `parent` with a page on one level; `draft` says whether its draft half
        is real. The hash must not be in the tree."""
        node = PageNode(page_hash, parent)
        self._nodes[page_hash] = node
        parent.children += 1
        if device is not None:
            self.set_device(node, device, draft)
        if host is not None:
            self.set_host(node, host, draft)
        return node

    def set_device(self, node: PageNode, index: int, draft: bool) -> None:
        """Gives the node a device page, in place of the one that it may have."""
        if node.device is None and node.parent is not None:
            node.parent.device_children += 1
        elif node.device is not None:
            self._device_pages.discard(node.device)
        self._device_pages.add(index)
        node.device, node.draft_on_device = index, draft
        self._device_leaves.offer(node)

    def set_host(self, node: PageNode, index: int, draft: bool) -> None:
        """Gives the node a host page, in place of the one that it may have."""
        if node.host is None and node.parent is not None:
            node.parent.host_children += 1
        node.host, node.draft_on_host = index, draft
        self._host_leaves.offer(node)

    def drop_device(self, node: PageNode) -> None:
        """Takes the node's device page away, and the node with it if nothing is left."""
        if node.device is not None and node.parent is not None:
            self._device_pages.discard(node.device)
            node.device, node.draft_on_device = None, False
            node.parent.device_children -= 1
            self._device_leaves.offer(node.parent)
            self._drop_if_empty(node)

    def drop_host(self, node: PageNode) -> None:
        """Takes the node's host page away, and the node with it if nothing is left."""
        if node.host is not None and node.parent is not None:
            node.host, node.draft_on_host = None, False
            node.parent.host_children -= 1
            self._host_leaves.offer(node.parent)
            self._drop_if_empty(node)

    def _drop_if_empty(self, node: PageNode) -> None:
        if node.device is None and node.host is None and node.parent is not None:
            if node.children:
                raise RuntimeError(f"{node} would leave {node.children} pages without a prefix")
            del self._nodes[node.hash]
            node.parent.children -= 1

    def lock_device(self, node: PageNode) -> None:
        node.device_locks += 1

    def unlock_device(self, node: PageNode) -> None:
        node.device_locks -= 1
        if not node.device_children:
            self._device_leaves.offer(node)

    def lock_host(self, node: PageNode) -> None:
        node.host_locks += 1

    def unlock_host(self, node: PageNode) -> None:
        node.host_locks -= 1
        if not node.host_children:
            self._host_leaves.offer(node)

    def touch(self, nodes: Sequence[PageNode]) -> None:
        """Makes the nodes the most recently used."""
        self._tick += 1
        for node in nodes:
            node.used = self._tick
            if not node.device_children:
                self._device_leaves.offer(node)
            if not node.host_children:
                self._host_leaves.offer(node)

    def pop_device_leaf(self) -> PageNode | None:
        """The least recently used device page that may go, or None. The caller drops it, or
        gives it back with `offer`."""
        return self._device_leaves.pop()

    def pop_host_leaf(self) -> PageNode | None:
        """The least recently used host page that may go, or None; as `pop_device_leaf`."""
        return self._host_leaves.pop()

    def offer(self, nodes: Sequence[PageNode]) -> None:
        """Lets popped leaves be popped again."""
        for node in nodes:
            self._device_leaves.offer(node)
            self._host_leaves.offer(node)


class _Leaves:
    """A lazy heap: entries are pushed whenever a node may have become a leaf and looked at
    again when popped, so that nothing has to be searched or removed."""

    def __init__(self, tree: RadixTree, is_leaf: Callable[[PageNode], bool]) -> None:
        self._tree = tree
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, int, PageNode]] = []
        self._pushes = 0

    def offer(self, node: PageNode) -> None:
        if self._is_leaf(node):
            self._pushes += 1
            heapq.heappush(self._heap, (node.used, self._pushes, node))
            if len(self._heap) > 4 * len(self._tree) + 64:
                self._rebuild()

    def pop(self) -> PageNode | None:
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            if used == node.used and self._is_leaf(node) and self._tree.holds(node):
                return node
        return None

    def _rebuild(self) -> None:
        leaves = [node for node in self._tree if self._is_leaf(node)]
        self._heap = [(node.used, i, node) for i, node in enumerate(leaves)]
        self._pushes = len(leaves)
        heapq.heapify(self._heap)


def _device_leaf(node: PageNode) -> bool:
    return node.device is not None and not node.device_locks and not node.device_children


def _host_leaf(node: PageNode) -> bool:
    return node.host is not None and not node.host_locks and not node.host_children
