"""Compiled grammars, kept by key while there is room."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class CompileCache(Generic[T]):
    """Least recently used goes first, and before it whatever no request needs; the newest always stays."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._needed: Counter[str] = Counter()
        self.bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def get(self, key: str) -> T | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: str, compiled: T, size_bytes: int) -> list[str]:
        """Keep one; returns the keys that had to go."""
        if key in self._kept:
            self.bytes -= self._kept.pop(key)[1]
        self._kept[key] = (compiled, size_bytes)
        self.bytes += size_bytes
        gone: list[str] = []
        while self.bytes > self._limit_bytes and len(self._kept) > 1:
            others = list(self._kept)[:-1]
            victim = next((other for other in others if not self._needed[other]), others[0])
            self.bytes -= self._kept.pop(victim)[1]
            del self._needed[victim]
            gone.append(victim)
        return gone

    def need(self, key: str) -> None:
        """A request needs this one, if it is kept."""
        if key in self._kept:
            self._needed[key] += 1

    def release(self, key: str) -> None:
        if self._needed[key] > 1:
            self._needed[key] -= 1
        else:
            del self._needed[key]
