"""The radix prefix cache: KV pages of finished text, found again by the tokens they hold.

Who owns which index range of a request::

    tokens    0 ............... shared .................. kv_len ......... len(tokens)
    pages     | the tree's, locked |  the request's own      |  not computed yet |
              '--- whole pages ----'--- last one may be partial'

Only whole pages are shared. Edges are compressed: a node holds a run of pages and splits at a page boundary when
another text parts from it in mid-run. A node with a lock (its own or below it) is never evicted.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Key = tuple[int, ...]
"""The tokens of one page."""


class Node:
    __slots__ = ("children", "keys", "locks", "pages", "parent", "used")

    def __init__(self, keys: list[Key], pages: list[int], parent: Node | None) -> None:
        self.keys = keys
        self.pages = pages
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.locks = 0
        self.used = 0


@dataclass(frozen=True)
class Match:
    """The longest cached prefix: its pages, in order, and the node to lock while they are in use."""

    node: Node
    pages: tuple[int, ...]


class PrefixCache:
    """Finds and keeps prefixes. ``enabled=False`` matches and keeps nothing. Order of use is counted, not timed,
    so that the same requests always evict the same pages."""

    def __init__(self, page_size: int, *, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.root = Node([], [], None)
        self.root.locks = 1
        self._uses = itertools.count(1)
        self._size = 0
        self._unlocked = 0

    @property
    def size(self) -> int:
        """Pages in the tree."""
        return self._size

    @property
    def evictable(self) -> int:
        """Pages in the tree that nothing locks."""
        return self._unlocked

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest cached prefix of ``tokens``, in whole pages."""
        node = self.root
        pages: list[int] = []
        keys = self._keys(tokens) if self.enabled else []
        at = 0
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                break
            shared = _common(child.keys, keys, at)
            if shared < len(child.keys):
                child = self._split(child, shared)
            child.used = next(self._uses)
            pages += child.pages
            node = child
            at += shared
        return Match(node, tuple(pages))

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[Match, list[int]]:
        """Hand the whole pages of ``tokens`` to the tree.

        ``pages[i]`` holds tokens ``i*page_size`` and on; a last, partial page is not taken. Returns the match of
        the same prefix (its pages are what the tree now holds for it) and those of ``pages`` that the tree did not
        take because it had the same tokens already: they still belong to the caller.
        """
        if not self.enabled:
            return Match(self.root, ()), list(pages)
        keys = self._keys(tokens)
        if len(pages) < len(keys):
            raise ValueError(f"{len(tokens)} tokens fill {len(keys)} pages, got {len(pages)}")
        found = self.match(tokens)
        have = len(found.pages)
        spare = [page for page, kept in zip(pages, found.pages, strict=False) if page != kept]
        spare += pages[len(keys) :]
        node = found.node
        if have < len(keys):
            fresh = Node(keys[have:], list(pages[have : len(keys)]), node)
            fresh.used = next(self._uses)
            node.children[keys[have]] = fresh
            self._size += len(fresh.pages)
            self._unlocked += len(fresh.pages)
            node = fresh
        return Match(node, found.pages + tuple(pages[have : len(keys)])), spare

    def lock(self, node: Node) -> None:
        """Keep a node and all above it from eviction."""
        step: Node | None = node
        while step is not None and step is not self.root:
            if step.locks == 0:
                self._unlocked -= len(step.pages)
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        step: Node | None = node
        while step is not None and step is not self.root:
            if step.locks == 0:
                raise ValueError("a node was unlocked more often than locked")
            step.locks -= 1
            if step.locks == 0:
                self._unlocked += len(step.pages)
            step = step.parent

    def evict(self, count: int) -> list[int]:
        """Drop the least recently used unlocked leaves until ``count`` pages are had (or no more can be)."""
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        freed: list[int] = []
        while leaves and len(freed) < count:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            assert parent is not None
            del parent.children[node.keys[0]]
            freed += node.pages
            self._size -= len(node.pages)
            self._unlocked -= len(node.pages)
            if parent is not self.root and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        return freed

    def pages(self) -> Iterator[int]:
        """Every page in the tree."""
        for node in self._nodes():
            yield from node.pages

    def _keys(self, tokens: Sequence[int]) -> list[Key]:
        size = self.page_size
        return [tuple(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]

    def _split(self, node: Node, at: int) -> Node:
        """Part a node at a page boundary; returns the upper half, which keeps the locks of the lower."""
        upper = Node(node.keys[:at], node.pages[:at], node.parent)
        upper.locks = node.locks
        upper.used = node.used
        assert node.parent is not None
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.pages, node.parent = node.keys[at:], node.pages[at:], upper
        upper.children[node.keys[0]] = node
        return upper

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _common(edge: Sequence[Key], keys: Sequence[Key], at: int) -> int:
    """How many pages of an edge go on matching ``keys`` from ``at``."""
    count = 0
    for mine, theirs in zip(edge, itertools.islice(keys, at, None), strict=False):
        if mine != theirs:
            break
        count += 1
    return count
