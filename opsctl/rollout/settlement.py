"""How the nodes of one rollout come to one end.

Committing takes three steps over all nodes: *prepare* (whatever can fail for want of room or rights is done, and
acknowledged), *decide* (each node's own record, which its dead-man obeys whoever dies), *act* (a rename). Until the
first decision everything reverts by itself. A node that cannot be reached while the others decide is asked again for
as long as its lease may live; if it stays away, what was decided elsewhere is withdrawn, and all go back.

What no protocol can exclude: an operator that dies between the first and the last decision leaves nodes that ended
differently. Then each node's dead-man pages, and ``resume`` or ``abort`` puts the committed ones back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from opsctl.service.manager import Lease, Override, ServiceManager, Unreachable
from opsctl.service.wait import Deadline, Waiter

_MARGIN_S = 15.0  # a node's dead-man acts a moment after its lease has ended


class Undecided(Exception):
    """No commit; the text says which node stands in the way. Nothing that was decided is left standing where it could
    be withdrawn."""


def commit(managers: Sequence[ServiceManager], lease: Lease, waiter: Waiter, note: Callable[[str], None]) -> None:
    """Settle it as committed on every node. ``note`` journals each step before it is taken.

    Raises Undecided, and the errors of a node that cannot prepare: then nothing was decided anywhere.
    """
    note("prepare")
    for manager in managers:
        manager.prepare_commit(lease)
    note("commit")
    decided: list[ServiceManager] = []
    for manager in managers:
        try:
            won = patiently(manager, lambda manager=manager: manager.decide(lease, "commit"), lease.ttl_s, waiter)  # type: ignore[misc]
        except Deadline:
            withdraw(decided, lease, waiter)
            raise Undecided(f"{manager.name} could not be reached to decide; the others were told to go back") from None
        if won != "commit":
            withdraw(decided, lease, waiter)
            raise Undecided(f"the dead-man of {manager.name} had decided to revert before the commit")
        decided.append(manager)


def withdraw(managers: Sequence[ServiceManager], lease: Lease, waiter: Waiter) -> dict[str, bool]:
    """Settle it as reverted where that is still possible; name -> whether it is. Raises Unreachable."""
    return {manager.name: manager.withdraw(lease) for manager in managers}


def patiently(manager: ServiceManager, ask: Callable[[], str], ttl_s: float, waiter: Waiter) -> str:
    """Ask a node again until it answers. Raises Deadline when its lease must have ended meanwhile."""
    found: list[str] = []

    def asked() -> bool:
        try:
            found.append(ask())
        except Unreachable as error:
            waiter.talk(f"{manager.name}: not reached: {error}")
            return False
        return True

    waiter.until(f"{manager.name} to be reached", asked, ttl_s + _MARGIN_S)
    return found[0]


def go_back(managers: Sequence[ServiceManager], lease: Lease, before: Mapping[str, Override | None]) -> dict[str, str]:
    """Take the change away on every node that answers: its trial, or what was committed of it. ``before``: the
    committed overrides as they were. Returns name -> why for the nodes that could not be asked."""
    away = {}
    for manager in managers:
        try:
            if not manager.withdraw(lease) or manager.read_change().committed != before[manager.name]:
                manager.restore(before[manager.name])
            else:
                manager.remove_trial()
        except Unreachable as error:
            away[manager.name] = str(error)
    return away
