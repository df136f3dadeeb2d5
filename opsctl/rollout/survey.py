"""What a rollout knows of a deployment's clients: what they will see, what was agreed about it, what was seen last."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

import msgspec

from monitors import engines
from monitors.fleet import Deployment
from opsctl.callers import agreed, foresee
from opsctl.callers.agreed import Agreed
from opsctl.rollout import before
from opsctl.rollout.before import Before, Recorded
from opsctl.rollout.plan import Plan, ServicePlan
from opsctl.rollout.result import Result
from opsctl.rollout.scope import Scope

_MODEL = ("model", "model-path")
_REMEMBERED_DAYS = 7


class Survey:
    """Of one deployment, with its records in ``folder``. Raises ServiceError for a record that cannot be read."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self._deployment, self._folder = deployment, folder
        self._dialect = engines.load(deployment.engine)
        self._bundles = Path(deployment.bundle_dir) if deployment.bundle_dir else folder.parent.parent / "bundles"

    def complete(self, made: Plan, more: Mapping[str, Agreed], allowance_pct: float | None) -> Plan:
        """The plan with what each caller will see, what was agreed to (``more``: for this rollout), and the allowance."""
        first = made.services[0]
        known = self.bare().classes
        environment = any(service.before.env != service.after.env for service in made.services)
        seen = foresee.foresee(
            self._deployment.caller, first.before.argv, first.after.argv, env_changes=environment,
            program_changes=any(_rest(service) for service in made.services), dialect=self._dialect, known=known,
        )  # fmt: skip
        allowance = self._deployment.throughput_allowance_pct if allowance_pct is None else allowance_pct
        return msgspec.structs.replace(made, agreed=agreed.all_of(self._deployment.caller, more), foreseen=seen, allowance_pct=allowance)

    def unagreed(self, made: Plan) -> tuple[str, ...]:
        """Changes that some client is certain to see and that nobody declared."""
        return foresee.undeclared(made.foreseen, {name: one.to for name, one in made.agreed.items()}, self._deployment.caller)

    def overdue(self, made: Plan | None, today: datetime.date) -> tuple[str, ...]:
        """Agreed changes whose day of review is past, one line each; of a plan, or of what is in force."""
        in_force = {**before.agreed(self._folder), **agreed.all_of(self._deployment.caller, {})}
        return agreed.overdue(made.agreed if made else in_force, today)

    def bare(self, flags: Mapping[str, str] | None = None, allowance_pct: float | None = None) -> Scope:
        """What is looked at when nothing is planned: the baseline."""
        last = before.read(self._folder)
        return Scope(self._deployment, flags=flags or {}, recorded=before.recorded(self._folder), before=last, allowance_pct=allowance_pct)

    def scope(self, made: Plan) -> Scope:
        """How far the proof of a plan looks."""
        first = made.services[0]
        old, new = foresee.flags_of(first.before.argv), foresee.flags_of(first.after.argv)
        same = old[0] == new[0] and all(old[1].get(flag) == new[1].get(flag) for flag in _MODEL)
        foreseen = {one.caller: one for one in made.foreseen}
        changed = frozenset(flag for flag in {*old[1], *new[1]} if old[1].get(flag) != new[1].get(flag))
        return Scope(self._deployment, new[1], made.agreed, foreseen, before.recorded(self._folder), before.read(self._folder),
                     made.allowance_pct, same, changed, self._bundles)  # fmt: skip

    def keep(self, found: Before, digest: str) -> None:
        """Record what a baseline was like. A client that has fallen silent since the last record is remembered for a week."""
        rates, last = found.rates.stamped(found.at_utc), before.read(self._folder)
        if last is not None:
            oldest = datetime.datetime.fromisoformat(found.at_utc) - datetime.timedelta(days=_REMEMBERED_DAYS)
            rates = rates.after(last.rates, oldest.isoformat(timespec="seconds"))
        before.write(self._folder, msgspec.structs.replace(found, rates=rates))
        before.keep(self._folder, {name: Recorded(kind, found.at_utc, digest) for name, kind in found.classes.items()}, {})

    def committed(self, made: Plan, result: Result, at_utc: str) -> None:
        """Record what each caller gets from now on, and what was declared about it."""
        rows: list[dict[str, str]] = next((check.data["callers"] for check in result.checks if check.name == "callers"), [])
        now = {row["caller"]: Recorded(row["after"], at_utc, made.digest_after) for row in rows if row["after"]}
        before.keep(self._folder, now, {name: one for name, one in made.agreed.items() if one.where != "the fleet file"})


def _rest(service: ServicePlan) -> bool:
    """Whether a service changes in something else than arguments and variables: a mounted file, say."""
    old, new = (msgspec.structs.replace(command, argv=(), env={}) for command in (service.before, service.after))
    return old != new


def told(made: Plan, unagreed: tuple[str, ...]) -> str:
    """What a plan says of the callers, for people; empty when the fleet file names none."""
    if not made.foreseen:
        return ""
    lines = ["what each caller will see:"]
    for one in made.foreseen:
        change = made.agreed.get(one.caller)
        lines.append(f"  {one.text}{f' (agreed: {change.to}, review by {change.review_by})' if change else ''}")
    lines += [f"apply will refuse this: {line}" for line in unagreed]
    return "\n".join(lines)
