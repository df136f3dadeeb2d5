"""What an operator can ask about the rollouts of one deployment: plan, apply, verify, status, resume, abort, history."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from monitors import fleet
from monitors.exit_codes import ExitCode
from opsctl.rollout import boots, deadlines, flags, history, journal, lock, operator, plan, preflight, standing, target, verified
from opsctl.rollout.baseline import Baseline
from opsctl.rollout.checks import Check
from opsctl.rollout.course import Course, Pager
from opsctl.rollout.drain import Drains
from opsctl.rollout.guard import Guard, known_exceptions
from opsctl.rollout.journal import Journal, State
from opsctl.rollout.pager import UrlPager
from opsctl.rollout.plan import Plan
from opsctl.rollout.probe import Api
from opsctl.rollout.refused import Refused
from opsctl.rollout.result import Result
from opsctl.rollout.survey import Survey
from opsctl.rollout.target import Target
from opsctl.rollout.verified import Verified
from opsctl.rollout.wish import Wish
from opsctl.service import together
from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import Lease, ServiceError, Unreachable
from opsctl.service.wait import Waiter

__all__ = ["Desk", "Refused", "Wish", "utc_now"]
_ROOT = Path(__file__).resolve().parents[2]


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Desk:
    """Raises FleetError or ServiceError when the deployment cannot be used."""

    def __init__(
        self, found: fleet.Fleet, name: str, env: Mapping[str, str], waiter: Waiter, *, pager: Pager | None = None, lock_wait_s: float = 0.0
    ) -> None:
        self.deployment = found.one(name)
        self.target = target.of(self.deployment, found.path, env)
        self.folder = fleet.state_root(env) / "rollouts" / self.deployment.name
        self._fleet_path = Path(found.path).absolute()
        self._waiter = waiter
        self._pager = pager or UrlPager(found.page.urls, fleet.state_root(env) / "owed")
        self._page_urls = found.page.urls
        self._lock_wait_s = lock_wait_s
        self._who = operator.who(env)
        self._apis: dict[str, Api] = {}
        self.survey = Survey(self.deployment, self.folder)

    def close(self) -> None:
        for api in self._apis.values():
            api.close()

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Asking.

    def plan(self, wish: Wish, *, predicts: bool = True) -> Plan:
        """Raises Refused. Without ``predicts`` the engine is not asked for digests."""
        try:
            stop_limit_s = max(manager.stop_limit_s() for manager in self.target.managers)
            times, sources = deadlines.derive(wish.times, self.deployment, boots.read(self.folder), stop_limit_s)
            problems = [*times.problems(), *preflight.of_services(self.target)]
            groups = tuple(tuple(manager.name for manager in group.managers) for group in self.target.groups)
            made = plan.make(self.deployment.name, self.target.managers, wish, times, predicts=predicts and self.target.speaks_digest,
                             times_from=sources, groups=groups)  # fmt: skip
            problems += preflight.of_change(self.target, wish, made)
            wrong, unasked = preflight.of_unit_files(self.target, wish)
            problems += wrong
            notes = preflight.unknown_flags(self.target, wish, made) if predicts and not problems else ()
            made = msgspec.structs.replace(
                made,
                drains=self.target.drains,
                notes=(*made.notes, *unasked, *notes),
                revert=verified.target_of(verified.read(self.folder), made),
            )
        except flags.EditError as error:
            raise Refused(ExitCode.USAGE, str(error)) from error
        except Unreachable as error:
            raise Refused(
                ExitCode.UNREACHABLE, str(error), "nothing was touched; try the node's `ssh` of the fleet file by hand"
            ) from error
        except ServiceError as error:
            raise Refused(ExitCode.USAGE, str(error)) from error
        if problems:
            raise Refused(ExitCode.USAGE, "; ".join(problems))
        return self.survey.complete(made, wish.agreed, wish.allowance_pct)

    def status(self) -> dict[str, Any]:
        """Services, overrides, leases, the last rollout and the revert target, as data."""
        members = {member.name: member for member in self.target.members}
        services = list(together.each(self.target.managers, lambda manager: standing.of(members[manager.name])).values())
        paths = journal.all_of(self.folder)[-1:]
        last = history.summaries(paths, self._journal)
        out = ""
        with contextlib.suppress(ValueError):  # a journal that cannot be read is told above
            for path in paths:
                times = self._journal(path).plan.times
                last[0]["next"] = standing.told(last[0], services, times.lease_s, times.hold_s)
            out = "\n".join(Drains(j.plan.drains, self.target.managers, j, self._waiter).left for j in map(self._journal, paths))
        known = verified.read(self.folder)
        owed = self._pager.owed() if isinstance(self._pager, UrlPager) else ()
        return {"deployment": self.deployment.name, "services": services, "last": last[0] if last else None,
                "verified": msgspec.to_builtins(known) if known else None, "owed": list(owed),
                "out_of_router": out}  # fmt: skip

    def history(self) -> list[dict[str, Any]]:
        return history.summaries(journal.all_of(self.folder), self._journal)

    def show(self, rollout: str) -> tuple[dict[str, Any], str]:
        """One rollout, by its id or the beginning of it; empty: the last. Raises Refused."""
        paths = [path for path in journal.all_of(self.folder) if path.stem.startswith(rollout)]
        if not journal.all_of(self.folder):
            raise Refused(ExitCode.USAGE, f"no rollout of {self.deployment.name} yet, so there is none to show",
                          f"journals would lie in {self.folder}")  # fmt: skip
        if not paths or (rollout and len(paths) > 1):
            known = ", ".join(path.stem for path in paths or journal.all_of(self.folder)[-5:])
            raise Refused(ExitCode.USAGE, f"{rollout}: {len(paths) or 'no'} rollouts begin so; there are {known}")
        try:
            return history.full(self._journal(paths[-1]))
        except ValueError as error:
            raise Refused(ExitCode.USAGE, str(error)) from error

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

    @property
    def _baseline(self) -> Baseline:
        return Baseline(self.target, self.folder, self.survey, self._api_of, self._waiter, utc_now)

    def verify(self, stable_s: float | None = None) -> tuple[Verified | None, tuple[Check, ...]]:
        """Prove what runs now and record it as the revert target. None when it is not proven."""
        with self._locked("verify"):
            self._refuse_unfinished()
            return self._baseline.verify(self.deployment.stable_s if stable_s is None else stable_s)

    def _api_of(self, group: Target) -> Api:
        if group.api not in self._apis:
            self._apis[group.api] = Api(group.api, group.api_key)
        return self._apis[group.api]

    def _locked(self, verb: str) -> AbstractContextManager[None]:
        for line in self._settle():
            self._waiter.talk(line)
        if self._lock_wait_s:
            self._waiter.talk(f"another rollout of {self.deployment.name}, if there is one, is waited for up to {self._lock_wait_s:g} s")
        return lock.held(self.folder, f"{self._who['user']}: {verb}", self._lock_wait_s)

    def _settle(self) -> tuple[str, ...]:
        """Pages that did not get out when they were due."""
        return self._pager.settle(self.target.managers) if isinstance(self._pager, UrlPager) else ()

    # Changing.

    def apply(self, wish: Wish, agree: Callable[[Plan], bool]) -> Result:
        """The whole way. ``agree`` is shown the plan after every refusal that is possible.

        Raises:
            Refused: nothing was touched. Locked: another rollout is under way.
        """
        with self._locked("apply"):
            self._refuse_unfinished()
            made = self.plan(wish)
            self._refuse_unagreed(made)
            baseline, checks = self._baseline.to_go_back_to(
                made, stable_s=self.deployment.stable_s, allow_red=wish.allow_red, no_revert_target=wish.no_revert_target
            )
            if not agree(made):
                raise Refused(ExitCode.USAGE, "nobody agreed to the plan; nothing was changed", "answer yes at the terminal, or give --yes")
            if self.plan(wish, predicts=False).digest != made.digest:
                raise Refused(ExitCode.USAGE, "the services changed while the plan was being read", "plan again")
            stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
            entry = self._journal(self.folder / f"{stamp}-{secrets.token_hex(3)}.jsonl")
            entry.write(State.planned, plan=made, known_exceptions=known_exceptions(self.target), by=self._who["user"], who=self._who,
                        reason=wish.reason, baseline=baseline, baseline_checks=checks)  # fmt: skip
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
            try:
                self.survey.committed(entry.plan, result, utc_now())
            except OSError as error:  # the nodes run it all the same
                self._waiter.talk(f"what callers get now could not be recorded: {error}")
        return result

    def _refuse_unfinished(self) -> None:
        last = self._last()
        if last is not None and last.entries and not last.state.final and last.state is not State.planned:
            remedy = "how it stands: opsctl rollout status; carry it on: opsctl rollout resume; take it back: opsctl rollout abort"
            raise Refused(ExitCode.LOCKED, f"rollout {last.id} has not ended, its journal stops at {last.state}", remedy)
        for manager in self.target.managers:
            if manager.read_change().trial is not None:
                holder = manager.lease_token() or "nobody"
                raise Refused(ExitCode.LOCKED, f"{manager.name}: has a trial that no journal here knows (held by {holder})",
                              "wait for its dead-man, or abort where it was started")  # fmt: skip

    def resume(self, *, attended: bool, reason: str = "") -> Result:
        with self._locked("resume"):
            guard = self._unfinished(attended)
            self._sign(guard.course.journal, "resume", reason)
            return self._ended(guard.resume(), guard.course.journal)

    def abort(self, why: str) -> Result:
        with self._locked("abort"):
            last = self._last()
            if last is not None and last.state is State.planned:
                raise Refused(ExitCode.USAGE, f"rollout {last.id} was planned and changed nothing, so there is nothing to abort")
            guard = self._unfinished(False)
            self._sign(guard.course.journal, "abort", why)
            return guard.abort(f"aborted as ordered by {self._who['user']}{f': {why}' if why else ''}")

    def put_back(self, rollout: str) -> str:
        """By a dead-man of this machine, for the rollout that it reverted: see ``Drains.put_back``."""
        entry = next((self._journal(path) for path in journal.all_of(self.folder) if path.stem == rollout), None)
        return Drains(entry.plan.drains, self.target.managers, entry, self._waiter).put_back(entry.plan.times.boot_s) if entry else ""

    def _sign(self, entry: Journal, event: str, reason: str) -> None:
        """Who came back to it, and why: a line that changes no state."""
        entry.write(entry.state, event, by=self._who["user"], who=self._who, reason=reason)

    def _unfinished(self, attended: bool) -> Guard:
        last = self._last()
        if last is None or not last.entries or last.state in (State.committed, State.reverted):
            raise Refused(ExitCode.USAGE, "no rollout of this deployment is under way, so there is nothing to carry on or take back",
                          "what there was: opsctl rollout history; to change something: opsctl rollout plan --set FLAG=VALUE")  # fmt: skip
        kept = last.entries[0].data.get("baseline")
        baseline = msgspec.convert(kept, Verified) if kept else verified.read(self.folder)
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
            on_expiry=page if local else (), pages=self._page_urls, title=self.deployment.name,
        )  # fmt: skip
        course = Course(self.target, entry, self._api_of, lease, baseline, self._pager, self._waiter, utc_now)
        return Guard(course, attended, self.survey.scope(entry.plan))
