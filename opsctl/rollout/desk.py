"""What an operator can ask about the rollouts of one deployment: plan, apply, verify, status, resume, abort, history."""

from __future__ import annotations

import datetime
import getpass
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from monitors import fleet
from monitors.exit_codes import ExitCode
from opsctl.callers.agreed import Agreed
from opsctl.callers.foresee import flags_of
from opsctl.rollout import flags, journal, lock, plan, target, verified
from opsctl.rollout.checks import Check, Outcome, overall, passed, run
from opsctl.rollout.guard import Guard, Pager, known_exceptions
from opsctl.rollout.journal import Journal, State
from opsctl.rollout.pager import UrlPager
from opsctl.rollout.plan import Plan, Times
from opsctl.rollout.probe import Api
from opsctl.rollout.proof import Expectation, Proof, exceptions
from opsctl.rollout.result import Result
from opsctl.rollout.survey import Survey
from opsctl.rollout.verified import Verified
from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import Lease, ServiceError, Unreachable
from opsctl.service.wait import Waiter

_ROOT = Path(__file__).resolve().parents[2]


class Refused(Exception):
    """Nothing was touched. ``code`` is the exit code, ``remedy`` what to do."""

    def __init__(self, code: ExitCode, message: str, remedy: str = "", checks: Sequence[Check] = ()) -> None:
        super().__init__(message)
        self.code, self.remedy, self.checks = code, remedy, tuple(checks)


@dataclass(frozen=True)
class Wish:
    """What the operator asked for."""

    edits: tuple[flags.Edit, ...]
    env: Mapping[str, str]
    times: Times
    incident: bool = False
    attended: bool = False
    reason: str = ""
    agreed: Mapping[str, Agreed] = field(default_factory=dict)
    allowance_pct: float | None = None


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Desk:
    """Raises FleetError or ServiceError when the deployment cannot be used."""

    def __init__(self, found: fleet.Fleet, name: str, env: Mapping[str, str], waiter: Waiter, *, pager: Pager | None = None) -> None:
        self.deployment = found.one(name)
        self.target = target.of(self.deployment, found.path, env)
        self.folder = fleet.state_root(env) / "rollouts" / self.deployment.name
        self._fleet_path = Path(found.path).absolute()
        self._waiter = waiter
        self._pager = pager or UrlPager(found.page.urls)
        self._api = Api(self.target.api, self.target.api_key)
        self.survey = Survey(self.deployment, self.folder)

    def close(self) -> None:
        self._api.close()

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Asking.

    def plan(self, wish: Wish, *, predicts: bool = True) -> Plan:
        """Raises Refused. Without ``predicts`` the engine is not asked for digests."""
        problems = list(wish.times.problems())
        try:
            for manager in self.target.managers:
                problems += manager.preflight()
            made = plan.make(self.deployment.name, self.target.managers, wish.edits, wish.env, wish.times,
                             predicts=predicts and self.target.speaks_digest, reason=wish.reason, incident=wish.incident)  # fmt: skip
        except flags.EditError as error:
            raise Refused(ExitCode.USAGE, str(error)) from error
        except Unreachable as error:
            raise Refused(ExitCode.UNREACHABLE, str(error)) from error
        except ServiceError as error:
            raise Refused(ExitCode.USAGE, str(error)) from error
        if problems:
            raise Refused(ExitCode.USAGE, "; ".join(problems))
        return self.survey.complete(made, wish.agreed, wish.allowance_pct)

    def status(self) -> dict[str, Any]:
        """Services, overrides, leases, the last rollout and the revert target, as data."""
        services = []
        for member in self.target.members:
            manager = member.manager
            change = manager.read_change()
            services.append({
                "name": member.name, "node": manager.node, "ranks": list(member.ranks), **msgspec.to_builtins(manager.snapshot()),
                "argv": list(manager.command().argv), "committed": change.committed is not None, "trial": change.trial is not None,
                "held_by": manager.lease_token(),
            })  # fmt: skip
        last = self._summaries(journal.all_of(self.folder)[-1:])
        known = verified.read(self.folder)
        return {"deployment": self.deployment.name, "services": services, "last": last[0] if last else None,
                "verified": msgspec.to_builtins(known) if known else None}  # fmt: skip

    def history(self) -> list[dict[str, Any]]:
        return self._summaries(journal.all_of(self.folder))

    def _summaries(self, paths: Sequence[Path]) -> list[dict[str, Any]]:
        """What each journal says; one that cannot be read is told as such and hides nothing else."""
        found = []
        for path in paths:
            try:
                found.append(_summary(self._journal(path)))
            except ValueError as error:
                found.append({"id": path.stem, "state": "unreadable", "edits": [], "reason": "", "why": str(error), "began_utc": "",
                              "ended_utc": "", "by": "", "states": []})  # fmt: skip
        return found

    def _last(self) -> Journal | None:
        """The latest rollout. Raises Refused when its journal cannot be read: it might be under way."""
        paths = journal.all_of(self.folder)
        if not paths:
            return None
        try:
            return self._journal(paths[-1])
        except ValueError as error:
            remedy = f"see with `opsctl rollout status` that no service has a trial, then move {paths[-1]} out of the way"
            raise Refused(ExitCode.USAGE, str(error), remedy) from error

    def _journal(self, path: Path) -> Journal:
        return Journal(path, utc_now, self._waiter.clock.monotonic)

    # The baseline.

    def verify(self) -> tuple[Verified | None, tuple[Check, ...]]:
        """Prove what runs now and record it as the revert target. None when it is not proven."""
        with lock.held(self.folder, "verify"):
            self._refuse_unfinished()
            return self._verify()

    def _verify(self, allowance_pct: float | None = None) -> tuple[Verified | None, tuple[Check, ...]]:
        managers = self.target.managers
        commands = {m.name: plan.Command(found.argv, dict(found.env)) for m in managers for found in (m.command(),)}
        digest = plan.predict(managers[0], commands[managers[0].name].argv, {}) if self.target.speaks_digest else ""
        frozen = {manager.name: manager.snapshot() for manager in managers}
        expected = Expectation(digest, commands, exceptions(self.target, frozen))
        proof = Proof(self.target, expected, frozen, self._api, self._waiter, answer_s=120.0)
        checks = tuple(proof.serving())
        if overall(checks) is not Outcome.passed:
            return None, checks
        _, now = flags_of(commands[managers[0].name].argv)
        seeing = Proof(self.target, expected, frozen, self._api, self._waiter, answer_s=120.0, scope=self.survey.bare(now, allowance_pct))
        checks = (*checks, run("before", lambda: self._record(seeing, digest)))
        if overall(checks) is not Outcome.passed:
            return None, checks
        found = Verified(deployment=self.deployment.name, at_utc=utc_now(), digest=digest, services=commands, by="verify")
        verified.write(self.folder, found)
        return found, checks

    def _record(self, proof: Proof, digest: str) -> Check:
        found = proof.before(utc_now())
        self.survey.keep(found, digest)
        told = ", ".join(f"{name} {kind}" for name, kind in {**found.rungs, **found.classes}.items())
        return passed("before", f"recorded what a change is held against: {told}", classes=found.classes, rungs=found.rungs)

    # Changing.

    def apply(self, wish: Wish, agree: Callable[[Plan], bool]) -> Result:
        """The whole way. ``agree`` is shown the plan after every refusal that is possible.

        Raises:
            Refused: nothing was touched. Locked: another rollout is under way.
        """
        with lock.held(self.folder, f"{getpass.getuser()}: apply"):
            self._refuse_unfinished()
            made = self.plan(wish)
            self._refuse_unagreed(made)
            baseline = self._baseline(made)
            if not agree(made):
                raise Refused(ExitCode.USAGE, "not agreed to; nothing was changed", "say yes, or give --yes")
            if self.plan(wish, predicts=False).digest != made.digest:
                raise Refused(ExitCode.USAGE, "the services changed while the plan was being read", "plan again")
            stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
            entry = self._journal(self.folder / f"{stamp}-{secrets.token_hex(3)}.jsonl")
            entry.write(State.planned, plan=made, known_exceptions=known_exceptions(self.target), by=getpass.getuser(), reason=wish.reason)
            self._page_overdue(made, entry.id)
            return self._ended(self._guard(entry, baseline, wish.attended).apply(), entry)

    def _refuse_unagreed(self, made: Plan) -> None:
        """A change that a client is certain to see needs no restart to be known."""
        found = self.survey.unagreed(made)
        if found:
            raise Refused(ExitCode.USAGE, "; ".join(found), "change those clients first, or say that it is agreed: "
                          "--expect-change NAME=CLASS --review-by DATE (or expect_change in the fleet file)")  # fmt: skip

    def _page_overdue(self, made: Plan, key: str) -> None:
        found = self.survey.overdue(made, datetime.datetime.now(datetime.UTC).date())
        if found:
            page = self._pager.page(f"{self.deployment.name}: an agreed change is to be reviewed", "\n".join(found), key)
            self._waiter.talk(f"{'; '.join(found)}: {'paged' if page.sent else f'no page went out: {page.reason}'}")

    def _ended(self, result: Result, entry: Journal) -> Result:
        if result.state is State.committed:
            self.survey.committed(entry.plan, result, utc_now())
        return result

    def _baseline(self, made: Plan) -> Verified:
        """The configuration to go back to. Raises Refused when there is none that is known to work."""
        if made.incident:
            known = verified.read(self.folder)
            if known is None:
                raise Refused(ExitCode.USAGE, "no configuration of this deployment was ever verified, so there is nothing to go back to",
                              "run `opsctl rollout verify` while it is well")  # fmt: skip
            moved = [s.name for s in made.services if known.services.get(s.name) != s.before]
            if moved:
                raise Refused(ExitCode.USAGE, f"{', '.join(moved)}: configured otherwise than when it was last verified ({known.at_utc})",
                              "a revert would not give back what was verified; restore that configuration first")  # fmt: skip
            return known
        self._waiter.talk("proving the baseline")
        found, checks = self._verify(made.allowance_pct)
        if found is None:
            bad = checks[-1]
            raise Refused(ExitCode.FOUND, f"the baseline is not green: {bad.name}: {bad.evidence}",
                          "in an incident --incident takes the recorded baseline", checks)  # fmt: skip
        return found

    def _refuse_unfinished(self) -> None:
        last = self._last()
        if last is not None and last.entries and not last.state.final and last.state is not State.planned:
            raise Refused(ExitCode.LOCKED, f"rollout {last.id} is {last.state}", "opsctl rollout resume, or opsctl rollout abort")
        for manager in self.target.managers:
            if manager.read_change().trial is not None:
                holder = manager.lease_token() or "nobody"
                raise Refused(ExitCode.LOCKED, f"{manager.name}: has a trial that no journal here knows (held by {holder})",
                              "wait for its dead-man, or abort where it was started")  # fmt: skip

    def resume(self, *, attended: bool) -> Result:
        with lock.held(self.folder, f"{getpass.getuser()}: resume"):
            guard = self._unfinished(attended)
            return self._ended(guard.resume(), guard.journal)

    def abort(self, why: str) -> Result:
        with lock.held(self.folder, f"{getpass.getuser()}: abort"):
            last = self._last()
            if last is not None and last.state is State.planned:
                raise Refused(ExitCode.USAGE, f"rollout {last.id} was planned and changed nothing, so there is nothing to abort")
            return self._unfinished(False).abort(why or "aborted by its operator")

    def _unfinished(self, attended: bool) -> Guard:
        last = self._last()
        if last is None or not last.entries or last.state in (State.committed, State.reverted):
            raise Refused(ExitCode.USAGE, "no rollout of this deployment is under way", "opsctl rollout history")
        baseline = verified.read(self.folder)
        if baseline is None:
            raise Refused(ExitCode.USAGE, f"{self.folder}/verified.json is gone, so the revert target is not known", "restore it")
        return self._guard(last, baseline, attended)

    def _guard(self, entry: Journal, baseline: Verified, attended: bool) -> Guard:
        local = all(isinstance(manager, EmbeddedService) for manager in self.target.managers)
        opsctl = ("env", f"PYTHONPATH={_ROOT}", sys.executable, "-m", "opsctl.cli")
        which = ("--fleet", str(self._fleet_path), "--deployment", self.deployment.name, "--rollout", entry.id)
        page = (*opsctl, "rollout", "deadman-page", *which)
        lease = Lease(
            token=entry.id, ttl_s=entry.plan.times.lease_s, decision=str(entry.path.with_suffix(".decision")) if local else "",
            on_expiry=page if local else (),
        )  # fmt: skip
        return Guard(self.target, entry, self._api, lease, baseline, self._pager, self._waiter, utc_now, attended,
                     scope=self.survey.scope(entry.plan))  # fmt: skip


def _summary(entry: Journal) -> dict[str, Any]:
    made = entry.plan
    whys = [e.data["why"] for e in entry.entries if e.data.get("why")]
    return {"id": entry.id, "state": str(entry.state), "edits": list(made.edits), "reason": made.reason, "why": whys[-1] if whys else "",
            "began_utc": entry.entries[0].at_utc, "ended_utc": entry.entries[-1].at_utc, "by": entry.entries[0].data.get("by", ""),
            "states": [str(e.state) for e in entry.entries if not e.event]}  # fmt: skip
