"""What runs before a change, proven or not, and so what a revert goes back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from monitors.exit_codes import ExitCode
from opsctl.callers.foresee import flags_of
from opsctl.rollout import boots, plan, verified
from opsctl.rollout.boots import Boot
from opsctl.rollout.checks import Check, passed, proven, run
from opsctl.rollout.plan import Command, Plan
from opsctl.rollout.probe import Api
from opsctl.rollout.proof import Expectation, Proof, exceptions
from opsctl.rollout.refused import Refused
from opsctl.rollout.survey import Survey
from opsctl.rollout.target import Target
from opsctl.rollout.verified import Verified
from opsctl.service.manager import ServiceManager, Snapshot
from opsctl.service.wait import Waiter

_ANSWER_S = 120.0
PREVIOUS = "nobody: what was configured when the change began"


@dataclass(frozen=True)
class Baseline:
    """Of one deployment, with its records in ``folder``. ``api``: gives the API of a group."""

    target: Target
    folder: Path
    survey: Survey
    api: Callable[[Target], Api]
    waiter: Waiter
    utc: Callable[[], str]

    def verify(
        self, stable_s: float, allowance_pct: float | None = None, digest: str | None = None
    ) -> tuple[Verified | None, tuple[Check, ...]]:
        """Prove what runs now and record it as the revert target. None when it is not proven.

        A start that is younger than ``stable_s`` is watched until it is that old: a crash loop has its good minutes.
        ``digest``: the configuration's, where it was predicted before.
        """
        commands = {
            m.name: Command(now.argv, dict(now.env), dict(now.mounts), now.unit) for m in self.target.managers for now in (m.command(),)
        }
        first = self.target.managers[0]
        if digest is None:
            digest = plan.predict(first, commands[first.name].argv, {}) if self.target.speaks_digest else ""
        found: list[Check] = []
        for at, group in enumerate(self.target.groups):
            frozen = {manager.name: manager.snapshot() for manager in group.managers}
            expected = Expectation(digest, commands, exceptions(group, frozen))
            proof = Proof(group, expected, frozen, self.api(group), self.waiter, answer_s=_ANSWER_S)
            found += proof.serving()
            if proven(found):
                found.append(self._lasting(proof, group, frozen, stable_s))
            if not proven(found):
                return None, tuple(found)
            if at == 0:
                _, now = flags_of(commands[first.name].argv)
                scope = self.survey.bare(now, allowance_pct)
                seeing = Proof(group, expected, frozen, self.api(group), self.waiter, answer_s=_ANSWER_S, scope=scope)
                found.append(run("before", lambda seeing=seeing: self._record(seeing, digest)))  # type: ignore[misc]
                if not proven(found):
                    return None, tuple(found)
            self._note_boot(frozen, digest)
        known = Verified(deployment=self.target.name, at_utc=self.utc(), digest=digest, services=commands, by="verify")
        verified.write(self.folder, known)
        return known, tuple(found)

    def _lasting(self, proof: Proof, group: Target, frozen: Mapping[str, Snapshot], stable_s: float) -> Check:
        """It has run for so long without a restart, or is watched until it has."""
        young = min(_age(manager, frozen[manager.name]) for manager in group.managers)
        if young < stable_s:
            self.waiter.talk(f"the start is {young:.0f} s old; watching it until it is {stable_s:g} s old")
            return proof.steady(stable_s - young)
        loops = [f"{name} {one.restarts}" for name, one in frozen.items() if one.restarts]
        told = f"; automatic restarts before: {', '.join(loops)}" if loops else ""
        return passed("steady", f"this start is {young:.0f} s old, more than the {stable_s:g} s that it must last{told}")

    def _record(self, proof: Proof, digest: str) -> Check:
        found = proof.before(self.utc())
        self.survey.keep(found, digest)
        told = ", ".join(f"{name} {kind}" for name, kind in {**found.rungs, **found.classes}.items())
        return passed("before", f"recorded what a change is held against: {told}", classes=found.classes, rungs=found.rungs)

    def _note_boot(self, frozen: Mapping[str, Snapshot], digest: str) -> None:
        """The boot of the start that was just proven, where its services say when they were ready."""
        if all(one.ready_mono > one.since_mono > 0 for one in frozen.values()):
            seconds = round(max(one.ready_mono - one.since_mono for one in frozen.values()), 3)
            by = " ".join(sorted(one.invocation_id[:8] for one in frozen.values()))
            boots.add(self.folder, Boot(at_utc=self.utc(), seconds=seconds, digest=digest, by=f"verify of {by}"))

    def to_go_back_to(self, made: Plan, *, stable_s: float, allow_red: bool, no_revert_target: bool) -> tuple[Verified, tuple[Check, ...]]:
        """The configuration of a revert, and the checks of what runs now. Raises Refused when it is not good enough."""
        checks: tuple[Check, ...] = ()
        if not made.incident:
            self.waiter.talk("proving the baseline")
            found, checks = self.verify(stable_s, made.allowance_pct, made.digest_before)
            if found is not None:
                return found, checks
            bad = next(check for check in reversed(checks) if not proven([check]))
            if not allow_red:
                raise Refused(ExitCode.FOUND, f"the baseline is not green: {bad.name}: {bad.evidence}",
                              "in an incident --incident takes the recorded baseline; --allow-red goes on regardless", checks)  # fmt: skip
            self.waiter.talk(f"THE BASELINE IS NOT GREEN ({bad.name}: {bad.evidence}); going on because of --allow-red")
        known = verified.read(self.folder)
        why, remedy = self._unfit(known, made)
        if known is not None and not why:
            return known, checks
        if not no_revert_target:
            raise Refused(ExitCode.USAGE, why, f"{remedy}; or --no-revert-target, and a revert goes back to what is configured now")
        self.waiter.talk(f"{why}; a revert will go back to what is configured now, because of --no-revert-target")
        before = {service.name: service.before for service in made.services}
        return Verified(deployment=self.target.name, at_utc=self.utc(), digest=made.digest_before, services=before, by=PREVIOUS), checks

    @staticmethod
    def _unfit(known: Verified | None, made: Plan) -> tuple[str, str]:
        """(why the recorded configuration is nothing to go back to, what to do); empty when it is."""
        if known is None:
            return "no configuration of this deployment was ever verified, so there is nothing to go back to", (
                "run `opsctl rollout verify` while it is well"
            )
        moved = [service.name for service in made.services if known.services.get(service.name) != service.before]
        restored = all(known.services.get(service.name) == service.after for service in made.services)
        if moved and not restored:  # a change made by hand may be taken back: that is what was verified
            return f"{', '.join(moved)}: configured otherwise than when it was last verified ({known.at_utc})", (
                "a revert would not give back what was verified; restore that configuration first"
            )
        return "", ""


def _age(manager: ServiceManager, snapshot: Snapshot) -> float:
    """Seconds since the main process started, on its own machine's clock."""
    return float(manager.read_file("/proc/uptime").split()[0]) - snapshot.since_mono
