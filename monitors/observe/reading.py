"""What an observer returns: a value, or the reason why there is none. A gap is never silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Reading(Generic[T]):
    """Exactly one of ``value`` and ``reason`` is set."""

    value: T | None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.value is not None


def gap(reason: str) -> Reading[T]:
    """No value, and why."""
    return Reading(None, reason)
