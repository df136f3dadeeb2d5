"""The pool of KV pages: who owns each page, and when a page that was given back may be used again.

Every page is in exactly one of four hands, and ``free + pending + cached + held == total`` always::

    free      in this pool, may be allocated
    pending   given back, but a forward pass that was launched before may still read or write it
    cached    owned by the prefix cache (which asks this pool for nothing and gives evicted pages back to it)
    held      owned by one request

A page is freed *by forward epoch*: it waits in ``pending`` until the forward pass that was the latest launched at
the time of its release has completed. Freed at once, it could be handed to another request while the device still
writes it for the old one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PoolError(RuntimeError):
    """The pool's books do not balance: a page leaked or was given back twice."""


class PagePool:
    """``total`` pages of ``page_size`` tokens. Page 0 is a real page; nothing is reserved."""

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._free: deque[int] = deque(range(total))
        self._pending: deque[tuple[int, list[int]]] = deque()
        self._pending_pages = 0
        self._completed = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def pending(self) -> int:
        return self._pending_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, or None when fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]

    def release(self, pages: Iterable[int], epoch: int) -> None:
        """Give pages back. They are free once forward pass ``epoch`` has completed."""
        returned = list(pages)
        if not returned:
            return
        if epoch <= self._completed:
            self._free.extend(returned)
        else:
            self._pending.append((epoch, returned))
            self._pending_pages += len(returned)

    def complete(self, epoch: int) -> None:
        """Forward pass ``epoch``, and so every earlier one, is done on the device."""
        self._completed = max(self._completed, epoch)
        while self._pending and self._pending[0][0] <= self._completed:
            _, pages = self._pending.popleft()
            self._pending_pages -= len(pages)
            self._free.extend(pages)

    def check(self, *, cached: Iterable[int], held: Iterable[int]) -> None:
        """Raise PoolError unless every page is in exactly one hand."""
        hands: dict[int, str] = {}
        groups = (
            ("free", self._free),
            ("pending", (page for _, pages in self._pending for page in pages)),
            ("cached", cached),
            ("held", held),
        )
        for name, pages in groups:
            for page in pages:
                if page in hands:
                    raise PoolError(f"page {page} is both {hands[page]} and {name}")
                hands[page] = name
        if len(hands) != self.total:
            missing = sorted(set(range(self.total)) - set(hands))[:8]
            raise PoolError(f"{self.total - len(hands)} of {self.total} pages are in nobody's hand, the first: {missing}")
