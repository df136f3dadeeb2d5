"""The KV memory of requests: the page pool and the prefix cache under one set of rules.

A request's ``Holding`` says which pages it reads and writes. Pages ``[:shared]`` belong to the prefix cache and are
locked; the rest are the request's own. See ``prefix.py`` for the picture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.cache.pages import PagePool
from engine.cache.prefix import Node, PrefixCache


@dataclass
class Holding:
    """``kv_len`` tokens are in the cache for certain; launched steps may add up to ``ahead`` more.
    ``changed`` says that ranks have not seen this page table yet."""

    pages: list[int] = field(default_factory=list)
    shared: int = 0
    node: Node | None = None
    kv_len: int = 0
    ahead: int = 0
    changed: bool = False

    @property
    def own(self) -> list[int]:
        return self.pages[self.shared :]


class KVMemory:
    def __init__(self, pool: PagePool, prefix: PrefixCache) -> None:
        self.pool = pool
        self.prefix = prefix
        self._unlocks: deque[tuple[int, Node]] = deque()
        self._completed = 0

    @property
    def available(self) -> int:
        """Pages that could be had now, by eviction where need be."""
        return self.pool.free + self.prefix.evictable

    def attach(self, tokens: Sequence[int], *, reuse: bool = True) -> Holding:
        """A holding that begins with the longest cached prefix. At least one token is left to compute, since
        its logits are wanted. The prefix is locked."""
        holding = Holding(changed=True)
        if reuse:
            found = self.prefix.match(tokens[:-1])
            self.prefix.lock(found.node)
            holding.node = found.node
            holding.pages = list(found.pages)
            holding.shared = len(found.pages)
            holding.kv_len = holding.shared * self.pool.page_size
        return holding

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Own enough pages for ``tokens`` tokens; False, and nothing changed, if they cannot be had."""
        need = self.pool.pages_for(tokens) - len(holding.pages)
        if need <= 0:
            return True
        if need > self.available:
            return False
        if need > self.pool.free:
            self.pool.release(self.prefix.evict(need - self.pool.free), epoch=0)
        pages = self.pool.allocate(need)
        if pages is None:
            return False
        holding.pages += pages
        holding.changed = True
        return True

    def publish(self, holding: Holding, tokens: Sequence[int], epoch: int) -> None:
        """Let other requests find what this one has computed. Where the tree had the same tokens already, the
        request goes over to the tree's pages and gives its own back."""
        whole = min(holding.kv_len, len(tokens)) // self.pool.page_size
        if whole <= holding.shared or not self.prefix.enabled:
            return
        found, spare = self.prefix.insert(tokens[: whole * self.pool.page_size], holding.pages[:whole])
        self.prefix.lock(found.node)
        if holding.node is not None:
            self._unlock(holding.node, epoch)
        holding.node = found.node
        holding.changed = holding.changed or bool(spare)
        holding.pages[:whole] = found.pages
        holding.shared = whole
        self.pool.release(spare, epoch)

    def release(self, holding: Holding, tokens: Sequence[int], epoch: int, *, keep: bool) -> None:
        """Give everything back once forward pass ``epoch`` is done. ``keep``: the tree takes the whole pages of
        what was computed, so that a continuation finds them."""
        if keep:
            self.publish(holding, tokens, epoch)
        self.pool.release(holding.own, epoch)
        if holding.node is not None:
            self._unlock(holding.node, epoch)
        holding.pages, holding.shared, holding.node = [], 0, None
        holding.kv_len = holding.ahead = 0

    def complete(self, epoch: int) -> None:
        """Forward pass ``epoch`` is done on the device."""
        self._completed = max(self._completed, epoch)
        self.pool.complete(epoch)
        while self._unlocks and self._unlocks[0][0] <= self._completed:
            self.prefix.unlock(self._unlocks.popleft()[1])

    def forget_prefixes(self) -> None:
        """Drop every cached prefix that nothing uses."""
        self.pool.release(self.prefix.evict(self.prefix.evictable), epoch=0)

    def check(self, holdings: Iterable[Holding]) -> None:
        """Raise PoolError unless every page is accounted for."""
        self.pool.check(cached=self.prefix.pages(), held=[page for holding in holdings for page in holding.own])

    def _unlock(self, node: Node, epoch: int) -> None:
        if epoch <= self._completed:
            self.prefix.unlock(node)
        else:
            self._unlocks.append((epoch, node))
