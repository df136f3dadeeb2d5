"""What a playbook may say. ``document.py`` reads one and names file and line of what is wrong.

A playbook is ``{name, kind, summary, needs, hypothesis, method, rollbacks, after}``: what must hold, what is done in which
order, what undoes it. What each probe measures is in ``probes.py``, what each need means in ``needs.py``.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from monitors.exit_codes import ExitCode
from monitors.fleet import answer_class
from monitors.judge.verdict import Class
from opsctl.callers import agreed
from opsctl.repro.experiment import Experiment
from opsctl.rollout import flags

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
Approval = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")]
LONGEST_S = 7 * 86400.0  # of a rollout's own times; the same as its deadlines have
_CHANGING = ("set", "unset", "env", "overlay", "remove_overlay", "image", "package", "model", "unit_file")
ACTIONS = ("run", "rollout", "load", "repro", "fault", "page")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Need(_Table):
    """One thing that must be there. Exactly one key."""

    role: Literal["prefill", "decode", "both", "router"] | None = None  # a service of this role in the deployment
    flag: str | None = None  # a flag that the engine knows
    command: str | None = None  # a command of opsctl
    engine: str | None = None  # the deployment's engine
    faults: Literal["allowed"] | None = None  # the deployment says allow_faults

    @model_validator(mode="after")
    def _one(self) -> Need:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("a need has one key: role, flag, command, engine or faults")
        return self

    def __str__(self) -> str:
        return " ".join(f"{key} {value}" for key, value in self.model_dump(exclude_none=True).items())


class Expectation(_Table):
    """A probe with what is tolerated."""

    probe: str  # its name; see the probes below
    tolerance: dict[str, Any] = Field(default_factory=dict)  # what that probe may be told


class Change(_Table):
    """A change, as ``opsctl rollout apply`` takes it. Files are named by absolute paths: whoever runs it may stand anywhere."""

    set: dict[str, Any] = Field(default_factory=dict)  # flag to value; true for a flag without one
    unset: tuple[str, ...] = ()  # flags that go
    env: dict[str, str] = Field(default_factory=dict)  # variables of the service's environment
    overlay: tuple[str, ...] = ()  # FILE=TARGET: files mounted over others
    remove_overlay: tuple[str, ...] = ()  # targets whose overlay goes
    image: str = ""  # of the container that the unit runs
    package: str = ""  # a folder: another environment to run the program from
    model: str = ""  # another model
    unit_file: tuple[str, ...] = ()  # [UNIT=]FILE: other systemd unit files
    incident: bool = False  # go by the recorded baseline: the server is down or wedged
    allow_red: bool = False  # go on although what runs now fails its proof
    no_revert_target: bool = False  # go on although no verified configuration is known
    boot_deadline_s: float | None = Field(default=None, gt=0, le=LONGEST_S)  # a start that is not ready by then has failed
    stable_s: float | None = Field(default=None, ge=0, le=LONGEST_S)  # how long it must hold before the commit
    lease_s: float | None = Field(default=None, gt=0, le=LONGEST_S)  # how long opsctl may be silent before each node reverts
    hold_s: float | None = Field(default=None, gt=0, le=LONGEST_S)  # how long a held rollout waits for a person
    failure_budget: int | None = Field(default=None, ge=0)  # so many replicas may fail their proof and are started once more
    throughput_allowance_pct: float | None = Field(default=None, ge=0, lt=100)  # speed is measured; a loss above it fails
    expect_change: dict[str, str] = Field(default_factory=dict)  # caller (or *) to the class that its answers may become (or expected)
    review_by: datetime.date | None = None  # of expect_change: somebody is paged when nobody has looked again by that day
    review_in_days: int | None = Field(default=None, gt=0, le=366)  # the same, counted from the day on which it is run

    @field_validator("set")
    @classmethod
    def _values(cls, value: dict[str, Any]) -> dict[str, Any]:
        for flag, given in value.items():
            if given is False or given is None or isinstance(given, list | dict):
                raise ValueError(f"{flag}: {given!r} is no value of a flag; write true for a flag without one, or name it under unset")
        return value

    @field_validator("overlay")
    @classmethod
    def _mounts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            file, _, target = one.partition("=")
            if not (file.startswith("/") and target.startswith("/")):
                raise ValueError(f"{one}: write FILE=TARGET, both absolute paths")
        return value

    @field_validator("unit_file")
    @classmethod
    def _units(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if not one.rpartition("=")[2].startswith("/"):
                raise ValueError(f"{one}: write FILE or UNIT=FILE, the file an absolute path")
        return value

    @field_validator("expect_change")
    @classmethod
    def _answers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, to in value.items():
            if to != agreed.EXPECTED:
                answer_class(to)
            if name == agreed.ANYBODY and (wrong := agreed.anybody_not(to)):
                raise ValueError(f"{name}: {wrong}")
        return value

    @model_validator(mode="after")
    def _something(self) -> Change:
        if not any(getattr(self, key) for key in _CHANGING):
            raise ValueError(f"changes nothing; give {', '.join(_CHANGING[:-1])} or {_CHANGING[-1]}")
        if bool(self.expect_change) != ((self.review_by is None) != (self.review_in_days is None)):
            raise ValueError("expect_change goes with one of review_by and review_in_days: the day by which somebody has looked again")
        try:
            self.edits()
        except flags.EditError as error:
            raise ValueError(str(error)) from error
        return self

    def edits(self) -> tuple[flags.Edit, ...]:
        """In the order in which a rollout makes them: first what goes, then what comes."""
        gone = (flags.parse_unset(flag) for flag in self.unset)
        return (*gone, *(flags.parse_set(flag if value is True else f"{flag}={value}") for flag, value in self.set.items()))

    def options(self, today: datetime.date) -> dict[str, Any]:
        """What is said beside flags and variables, by the option of ``opsctl rollout apply``: a list for one that may be
        repeated, true for one without a value."""
        day = self.review_by or (today + datetime.timedelta(days=self.review_in_days) if self.review_in_days else None)
        found = {
            "--overlay": list(self.overlay), "--remove-overlay": list(self.remove_overlay), "--image": self.image,
            "--package": self.package, "--model": self.model, "--unit-file": list(self.unit_file), "--incident": self.incident,
            "--allow-red": self.allow_red, "--no-revert-target": self.no_revert_target, "--boot-deadline-s": self.boot_deadline_s,
            "--stable-s": self.stable_s, "--lease-s": self.lease_s, "--hold-s": self.hold_s, "--failure-budget": self.failure_budget,
            "--throughput-allowance": self.throughput_allowance_pct,
            "--expect-change": [f"{name}={to}" for name, to in self.expect_change.items()], "--review-by": day.isoformat() if day else "",
        }  # fmt: skip
        return {option: value for option, value in found.items() if value is not None and value is not False and value not in ("", [])}


class Step(_Table):
    """One thing to do: exactly one of run, rollout, load, repro, fault, page. ``expects``: exit codes of a command that mean
    that it went as wished. ``when``: of a rollback; ``failed`` keeps a change that held."""

    name: Name  # its own in the playbook
    run: str = ""  # a command line; $FLEET and $DEPLOYMENT are filled in, and no shell sees it
    rollout: Change | None = None
    load: dict[str, Any] | None = None  # flags of `opsctl load run`
    repro: Experiment | None = None  # an experiment, carried out by `opsctl repro run`
    fault: str = ""  # NAME[:key=value,...], armed through the admin route; all are lifted when the playbook ends
    page: str = ""  # a text for the people of the fleet file
    deadline_s: float = Field(gt=0, le=86400)  # it is ended after it, with all that it started
    approval: Approval = ""  # the kind of approval without which it is not done
    expects: tuple[int, ...] = (0,)  # exit codes that mean that it went as wished
    when: Literal["always", "failed"] = "always"  # of a rollback: failed keeps a change that held

    @field_validator("expects", mode="before")
    @classmethod
    def _one_code(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int) else value

    @field_validator("expects")
    @classmethod
    def _known_codes(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        unknown = [code for code in value if code not in list(ExitCode)]
        if unknown or not value:
            raise ValueError(f"{unknown or 'nothing'} is no exit code; there are {', '.join(str(int(code)) for code in ExitCode)}")
        return value

    @model_validator(mode="after")
    def _one_action(self) -> Step:
        given = [action for action in ACTIONS if getattr(self, action) not in ("", None)]
        if len(given) != 1:
            raise ValueError(f"a step does one thing, this one {' and '.join(given) or 'nothing'}; give one of {', '.join(ACTIONS)}")
        if self.rollout is not None and not self.approval:
            raise ValueError("a rollout changes configuration: say who may agree to it, e.g. approval: change-configuration")
        return self

    @property
    def action(self) -> str:
        return next(action for action in ACTIONS if getattr(self, action) not in ("", None))


class Targets(_Table):
    """Seconds after the injection by which each moment should have come. What is not given is not scored."""

    detected_s: float | None = Field(default=None, gt=0)
    captured_s: float | None = Field(default=None, gt=0)
    mitigated_s: float | None = Field(default=None, gt=0)
    recovered_s: float | None = Field(default=None, gt=0)


class Drill(_Table):
    """What a playbook of kind drill says beside its method, which injects. ``verdicts``: what the monitor may call it first;
    empty: nothing needs a name. ``also``: what it must call it besides, with evidence of its own. ``pages``: whether
    somebody must be paged, or nobody may be. ``gateway``: the clients come by one that answers over a 400 by itself, and
    `opsctl callers watch` looks on; what it ends with is the verdict. ``values`` fills variables of the runbook; the value
    ``stopped`` is the pid of the process that stands in state T, ``in-30-days`` that day."""

    runbook: str = ""
    verdicts: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # what it must call it besides the first name
    told_apart: bool = False  # each fault comes once the one before has its verdict, and stays; triage must then tell every one
    by_hand: Change | None = None  # a change past every guard, made before the method; only on an engine that is booted for it
    canary: bool = False  # the monitor compares a seeded answer under load with the one at rest
    gateway: bool = False  # clients come by a gateway that answers over a 400 by itself; `opsctl callers watch` is beside it
    outdated: bool = False  # the monitor was started with the fleet file of another engine, and lacks what would tell a class
    recaptured: str = ""  # what a capture of the runbook must call it, where the monitor could not tell
    pages: bool = True
    server: tuple[str, ...] = ()  # flags of the engine that is booted for it
    traffic: Literal["agent", "agents", "agent-and-json", "scan", "tools"] = "agent"  # clients beside which it happens
    approve: tuple[str, ...] = ()  # kinds of step that --auto may take
    skip: tuple[str, ...] = ()  # steps of the runbook that --auto leaves out
    values: dict[str, str] = Field(default_factory=dict)
    watch_s: float = Field(default=20.0, gt=0)  # where nobody may be paged: for how long that is watched
    steady_s: float = Field(default=4.0, gt=0)  # how long all must be well before it is over
    targets: Targets = Targets()
    every_days: int = Field(default=90, gt=0)

    @field_validator("by_hand")
    @classmethod
    def _flags_alone(cls, value: Change | None) -> Change | None:
        if value is not None and (more := sorted(value.model_fields_set - {"set", "unset", "env"})):
            raise ValueError(f"{', '.join(more)}: a change by hand is one of set, unset and env")
        return value

    @field_validator("verdicts", "also", "recaptured")
    @classmethod
    def _classes(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        unknown = [one for one in ([value] if isinstance(value, str) else value) if one and one not in list(Class)]
        if unknown:
            raise ValueError(f"{unknown[0]} is no class of verdict; there are {', '.join(Class)}")
        return value


class Playbook(_Table):
    """``after`` is the hypothesis again, or more than that: a list is held beside the hypothesis.

    The hypothesis is checked before the first step and after the last. For an experiment or a drill it must hold before;
    a rollout and a response are what one reaches for when it does not, so there it is only told, unless ``before`` says more.
    """

    name: Name  # the file's, without .yaml
    kind: Literal["rollout", "response", "experiment", "drill"]  # what it is for
    summary: str  # one sentence
    needs: tuple[Need, ...] = ()  # what must be there; each has one key
    hypothesis: tuple[Expectation, ...]  # what must hold, before (an experiment, a drill) and after
    before: Literal["", "holds", "fails", "told"] = ""  # fails: nothing is begun while all is well, unless --incident is said
    method: tuple[Step, ...]  # what is done, in this order; each step does one thing
    rollbacks: tuple[Step, ...] = ()  # what undoes it, once a step has acted
    after: Literal["hypothesis"] | tuple[Expectation, ...] = "hypothesis"  # the word hypothesis, or what must hold beside it
    drill: Drill | None = None

    @model_validator(mode="after")
    def _whole(self) -> Playbook:
        if not self.method:
            raise ValueError("method: no step; say what is done")
        names = [step.name for step in (*self.method, *self.rollbacks)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f'two steps have the name "{twice}"')
        if (self.drill is not None) != (self.kind == "drill"):
            raise ValueError("kind: drill and the table drill go together")
        changes = [step for step in self.method if step.rollout is not None]
        if self.kind == "rollout" and len(changes) != 1:
            raise ValueError(f"kind: rollout is one change: one rollout step, and this has {len(changes)}")
        if any(step.fault for step in self.method) and not any(need.faults for need in self.needs):
            raise ValueError("a step arms a fault: needs must say faults: allowed")
        if not self.hypothesis and self.before in ("holds", "fails"):
            raise ValueError(f"before: {self.before}: there is no hypothesis that could")
        if not self.hypothesis and self.after == "hypothesis":
            raise ValueError("nothing says what must hold in the end; give hypothesis or after")
        return self

    @property
    def gate(self) -> str:
        """What the hypothesis must do before the first step: holds, fails, or told (whatever it does)."""
        return self.before or ("holds" if self.kind in ("experiment", "drill") else "told")

    @property
    def expected(self) -> tuple[Expectation, ...]:
        """What must hold when it is over."""
        return self.hypothesis if self.after == "hypothesis" else (*self.hypothesis, *self.after)

    @property
    def approvals(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.approval for step in (*self.method, *self.rollbacks) if step.approval))


def change(playbook: Playbook) -> Change:
    """The change of a ``kind: rollout`` playbook. Raises ValueError for another kind."""
    if playbook.kind != "rollout":
        raise ValueError(
            f"playbook {playbook.name}: kind {playbook.kind} is no single change; run it with: opsctl playbook run {playbook.name}"
        )
    return next(step.rollout for step in playbook.method if step.rollout is not None)


def edits(playbook: Playbook) -> Sequence[flags.Edit]:
    """The edits of a ``kind: rollout`` playbook, for ``opsctl rollout apply --playbook``; what it says beside them is in
    ``change(playbook)``. Raises ValueError for another kind."""
    return change(playbook).edits()
