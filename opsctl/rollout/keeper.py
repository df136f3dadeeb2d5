"""The operator's side of the dead-men: arming them, renewing them in every wait, taking them down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opsctl.service.manager import Lease, LeaseLost, ServiceError, ServiceManager, Unreachable


class Keeper:
    """Holds one lease on every service of a group. ``renew`` is cheap to call often: it acts each quarter of the
    lease. With ``lenient`` a lost lease and a node that is away are no errors: on the way back the dead-man and the
    operator want the same, and while they decide each node that answers counts."""

    def __init__(self, managers: Sequence[ServiceManager], lease: Lease, now: Callable[[], float], talk: Callable[[str], None]) -> None:
        self._managers, self._lease, self._now, self._talk = managers, lease, now, talk
        self._holding = False
        self._renewed_at = 0.0
        self.lenient = False

    def arm(self) -> None:
        """Raises Locked, and the other errors of the service managers."""
        for manager in self._managers:
            manager.arm(self._lease)
        self._renewed_at = self._now()
        self._holding = True

    def arm_reachable(self) -> None:
        """On the way back: what cannot be reached is left to its own dead-man."""
        for manager in self._managers:
            try:
                manager.arm(self._lease)
            except Unreachable as error:
                self._talk(f"{manager.name}: not reached: {error}")
        self._renewed_at = self._now()
        self._holding = True

    def renew(self) -> None:
        """Raises LeaseLost and Unreachable unless lenient, and the other errors of the service managers."""
        now = self._now()
        if not self._holding or now - self._renewed_at < self._lease.ttl_s / 4:
            return
        self._renewed_at = now
        for manager in self._managers:
            try:
                manager.renew(self._lease.token, self._lease.ttl_s)
            except (LeaseLost, Unreachable):
                if not self.lenient:
                    raise

    def lengthen(self, ttl_s: float) -> None:
        """Once, and then leave it: a held rollout."""
        for manager in self._managers:
            manager.renew(self._lease.token, ttl_s)
        self._holding = False

    def disarm(self) -> None:
        """What cannot be disarmed will find the rollout decided, and do nothing that is not done."""
        self._holding = False
        for manager in self._managers:
            try:
                manager.disarm(self._lease.token)
            except ServiceError as error:
                self._talk(f"{manager.name}: its dead-man could not be disarmed: {error}")

    def decided(self) -> list[str]:
        """What was settled, one entry for each service that was settled."""
        return [found for manager in self._managers if (found := manager.decided(self._lease))]
