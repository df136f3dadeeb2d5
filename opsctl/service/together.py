"""Asking the services of a group at once: over ssh each question is a round trip, and a group is as old as its oldest
answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from opsctl.service.manager import ServiceManager, Snapshot

_T = TypeVar("_T")
_MOST = 16


def each(managers: Sequence[ServiceManager], ask: Callable[[ServiceManager], _T]) -> dict[str, _T]:
    """``ask`` of every service, by name, all at once. Raises what the first of them raised, when all have come back."""
    if len(managers) <= 1:
        return {manager.name: ask(manager) for manager in managers}
    with ThreadPoolExecutor(min(len(managers), _MOST)) as pool:
        answers = [(manager.name, pool.submit(ask, manager)) for manager in managers]
    return {name: answer.result() for name, answer in answers}


def snapshots(managers: Sequence[ServiceManager]) -> dict[str, Snapshot]:
    return each(managers, lambda manager: manager.snapshot())
