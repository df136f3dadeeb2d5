"""A plan as it is read by somebody who was woken for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from opsctl.rollout.boots import Boot, slowest
from opsctl.rollout.plan import Plan

_NAMES = {"boot_s": "boot", "answer_s": "one answer", "stable_s": "steady", "stop_s": "stop", "lease_s": "lease", "hold_s": "hold",
          "revert_boot_s": "revert's boot"}  # fmt: skip


def text(made: Plan, callers: str, recorded: Sequence[Boot], more: str | None = None) -> str:
    """What changes, in which order, how long it may take and what it goes back to; the files last. ``callers``: see
    ``survey.told``; ``more``: what the command that carries it out says beside the change, None where this is that command."""
    parts = [f"rollout of {made.deployment}: {' '.join(made.edits)}" + (f"  # {made.reason}" if made.reason else ""), "",
             *([made.commands_diff(), ""] if made.commands_diff() else [])]  # fmt: skip
    if made.digest_after:
        same = "  (the same: nothing that the engine declares changes)" if made.digest_after == made.digest_before else ""
        parts.append(f"configuration   {made.digest_before[:12]} -> {made.digest_after[:12]}{same}")
    parts += _order(made, slowest(recorded))
    parts.append(f"revert target   {_revert(made)}")
    parts += [callers] if callers else []
    parts.append("deadlines")
    parts += [f"  {_NAMES[key]:<14} {getattr(made.times, key):>7.6g} s  {why}" for key, why in made.times_from.items()]
    trials = sorted({file.trial for service in made.services for file in service.files})
    parts.append(f"until the commit the change lies in {', '.join(trials)}; a reboot, or silence of this command, takes it away")
    parts += ["", "files that the commit writes:", made.files_diff(), ""]
    parts += [f"note: {note}" for note in made.notes]
    parts.append(f"plan {made.digest}")
    if more is not None:
        parts += ["nothing was touched. Carried out by:", f"  opsctl rollout apply {command(made.edits)}{more}"]
    return "\n".join(parts)


def command(edits: Sequence[str]) -> str:
    """The words of a change as a shell takes them."""
    return " ".join(f"{option} {shlex.quote(value)}" for option, _, value in (one.partition(" ") for one in edits))


def _order(made: Plan, boot: Boot | None) -> list[str]:
    groups = made.groups or (tuple(service.name for service in made.services),)
    took = (
        f"about {boot.seconds:.1f} s without service, as its slowest recorded boot" if boot else "how long a boot takes is not recorded yet"
    )
    if len(groups) == 1:
        return [f"order           {', '.join(groups[0])}: drain, stop and start together; {took}", *_drains(made)]
    lines = [f"order           {len(groups)} replicas, one at a time; each: {took}"]
    for number, names in enumerate(groups, 1):
        lines.append(f"  {number}. {', '.join(names)}{'  (the canary: no failure is allowed)' if number == 1 else ''}")
    lines += _drains(made)
    if made.failure_budget:
        lines.append(
            f"  a later one that fails its proof is started once more, {made.failure_budget} times in all; then everything reverts"
        )
    return lines


def _drains(made: Plan) -> list[str]:
    """The commands of the fleet file that take a group out of its router."""
    return [
        f"  {one.service}: before it stops `{shlex.join(one.out)}`, when it answers again `{shlex.join(one.back)}` (each at most "
        f"{one.deadline_s:g} s)"
        for one in made.drains
    ]


def _revert(made: Plan) -> str:
    if made.revert is None:
        return "none is recorded; apply proves what runs now and records that first"
    digest = f"{made.revert.digest[:12]}, " if made.revert.digest else ""
    now = "what is configured now" if made.revert.runs_now else "NOT what is configured now: apply proves what runs first and records that"
    return f"{digest}verified {made.revert.at_utc} by {made.revert.by}; {now}"
