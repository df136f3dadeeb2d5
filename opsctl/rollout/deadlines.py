"""How long each step of a rollout may take, and who says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from monitors.fleet import Deployment
from opsctl.rollout import boots
from opsctl.rollout.boots import Boot

BOOT_FACTOR = 3.0  # of the slowest recorded boot: a cold page cache and a busy disk are no failure
BOOT_LEAST_S = 60.0
ANSWER_S = 120.0
MOST_S = 7 * 86400.0
_STOP_MARGIN_S = 15.0
_STOP_S = 90.0


class Times(msgspec.Struct, frozen=True):
    """Deadlines in seconds. ``stop_s`` holds for all services of a group together; ``revert_boot_s`` is the boot
    deadline of the way back. They nest: answer <= boot <= revert boot, lease <= hold."""

    boot_s: float = 720.0
    stable_s: float = 60.0
    stop_s: float = 90.0
    answer_s: float = 120.0
    lease_s: float = 60.0
    hold_s: float = 3600.0
    revert_boot_s: float = 720.0

    def problems(self) -> tuple[str, ...]:
        """Why these cannot work together; empty when they can."""
        found = []
        if self.answer_s > self.boot_s:
            found.append(f"--boot-deadline-s {self.boot_s:g} is below the {self.answer_s:g} s that one answer may take")
        if self.revert_boot_s < self.boot_s:
            found.append(f"the revert would get {self.revert_boot_s:g} s to boot, less than the {self.boot_s:g} s of the change itself")
        if self.hold_s < self.lease_s:
            found.append(f"hold_s {self.hold_s:g} is below the lease of {self.lease_s:g} s")
        for name in ("boot_s", "stop_s", "answer_s", "lease_s", "hold_s", "revert_boot_s"):
            if not 0 < getattr(self, name) <= MOST_S:
                found.append(f"{name}: {getattr(self, name):g} is no time; give seconds above 0, up to {MOST_S:g}")
        if not 0 <= self.stable_s <= MOST_S:
            found.append(f"stable_s: {self.stable_s:g} is no time; give seconds, up to {MOST_S:g}")
        return tuple(found)


@dataclass(frozen=True)
class Asked:
    """What the operator gave on the command line; None where nothing was given."""

    boot_s: float | None = None
    stable_s: float | None = None
    lease_s: float = 60.0
    hold_s: float | None = None


def derive(asked: Asked, deployment: Deployment, recorded: Sequence[Boot], stop_limit_s: float) -> tuple[Times, dict[str, str]]:
    """The deadlines, and for each where it comes from. ``stop_limit_s``: the service managers' own (0: not known)."""
    most = deployment.boot_deadline_s
    slowest = boots.slowest(recorded)
    if asked.boot_s is not None:
        boot_s, why = asked.boot_s, "--boot-deadline-s"
    elif slowest is None:
        boot_s, why = most, "the fleet file's boot_deadline_s; no boot of this deployment is recorded yet"
    else:
        boot_s = min(most, max(BOOT_LEAST_S, BOOT_FACTOR * slowest.seconds))
        count = min(len(recorded), boots.RECENT)
        why = (
            f"{BOOT_FACTOR:g} x {slowest.seconds:.1f} s, the slowest of the last {count} recorded boots "
            f"(at least {BOOT_LEAST_S:g} s, at most boot_deadline_s {most:g} s)"
        )
    stable = ("the fleet file's stable_s", deployment.stable_s) if asked.stable_s is None else ("--stable-s", asked.stable_s)
    hold = ("the fleet file's hold_s", deployment.hold_s) if asked.hold_s is None else ("--hold-s", asked.hold_s)
    stop_s = stop_limit_s + _STOP_MARGIN_S if stop_limit_s else _STOP_S
    revert_boot_s = max(most, boot_s)
    times = Times(boot_s=boot_s, stable_s=stable[1], stop_s=stop_s, answer_s=min(ANSWER_S, boot_s), lease_s=asked.lease_s, hold_s=hold[1],
                  revert_boot_s=revert_boot_s)  # fmt: skip
    return times, {
        "boot_s": why,
        "stable_s": stable[0],
        "stop_s": f"the service manager's own limit of {stop_limit_s:g} s, and {_STOP_MARGIN_S:g} s"
        if stop_limit_s
        else "no limit is known",
        "answer_s": "one completion, at most the time of a boot",
        "lease_s": "--lease-s; when the operator is silent for so long, each node reverts by itself and pages",
        "hold_s": f"{hold[0]}; what cannot be told waits so long for resume or abort, then reverts",
        "revert_boot_s": "boot_deadline_s: the way back gets all the time there is",
    }
