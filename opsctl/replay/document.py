"""A day as a document: what is served, what is done step by step, what must be seen, and the table at the end.

``read`` validates one; what is wrong is told with the file and the place in it.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from opsctl.playbooks.schema import Change
from opsctl.replay import facts

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]


class DayError(ValueError):
    """A day's document that cannot be used."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Tolerance(_Table):
    """What a fact must be. Exactly one of ``equals`` and ``one_of``, or a range."""

    equals: bool | int | float | str | None = None
    one_of: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Tolerance:
        ranged = self.least is not None or self.most is not None
        if (self.equals is not None) + bool(self.one_of) + ranged != 1:
            raise ValueError("give equals, one_of, or least and most")
        return self


class Wedge(_Table):
    """The loop, and one constrained request beside it."""

    turns: int = Field(default=2, ge=1)  # of the loop before it


class Capture(_Table):
    """The monitor's bundle of the wedge."""


class Repro(_Table):
    """A shipped experiment with some of its keys changed, run by ``opsctl repro run``."""

    of: Name
    change: dict[str, Any] = Field(default_factory=dict)


class Rollout(_Table):
    """A change through ``opsctl rollout apply --incident``. ``agreed``: callers and what they may get from now on.
    ``fallback``: statuses over which the clients' gateway asks somebody else. ``speed``: tokens in a second before and after."""

    change: Change
    agreed: dict[str, str] = Field(default_factory=dict)
    fallback: tuple[int, ...] = ()
    speed: bool = False


class Step(_Table):
    """One thing that is played. ``needs``: steps without which it means nothing. ``holds``: what its facts must be."""

    name: Name
    says: str
    needs: tuple[Name, ...] = ()
    deadline_s: float = Field(gt=0, le=3600)
    wedge: Wedge | None = None
    capture: Capture | None = None
    repro: Repro | None = None
    rollout: Rollout | None = None
    holds: dict[str, Tolerance]

    @property
    def kind(self) -> str:
        return next(kind for kind in facts.KINDS if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _whole(self) -> Step:
        given = [kind for kind in facts.KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"step {self.name} plays {' and '.join(given) or 'nothing'}; give one of {', '.join(facts.KINDS)}")
        if not self.holds:
            raise ValueError(f"step {self.name}: holds nothing: it could not fail")
        known = facts.names(self.kind)
        for name in self.holds:
            if name not in known:
                raise ValueError(f"step {self.name}: holds.{name}: a step of kind {self.kind} measures {', '.join(known)}")
        return self


class Row(_Table):
    """A line of the table. ``ours`` is a format over the facts, ``{step[fact]:.1f}``; ``{day[fact]}`` is of the whole day.
    ``scaled``: how the measured time differs from that day's by our own choice."""

    what: str
    then: str
    ours: str
    scaled: str = ""

    def fields(self) -> list[tuple[str, str]]:
        """(step, fact) of each cell's part."""
        found = []
        for text in (self.ours, self.scaled):
            for _, name, _, _ in string.Formatter().parse(text):
                if name is not None:
                    step, _, fact = name.partition("[")
                    found.append((step, fact.removesuffix("]")))
        return found


class Caller(_Table):
    """A client of the deployment. ``gateway``: it asks through the clients' gateway."""

    name: Name
    request: dict[str, Any]
    expect: str
    never_live: bool = False
    gateway: bool = False


class Day(_Table):
    """``server``: flags of the engine. ``watchdog_s``, ``stable_s``, ``stall_s``: of the engine's watchdog, the rollouts'
    stability window and the monitor's declaration."""

    name: Name
    summary: str
    server: tuple[str, ...]
    watchdog_s: int = Field(gt=0)
    stable_s: float = Field(gt=0)
    stall_s: float = Field(gt=0)
    callers: tuple[Caller, ...] = ()
    steps: tuple[Step, ...]
    table: tuple[Row, ...]
    every_days: int = Field(default=90, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Day:
        seen: dict[str, str] = {}
        for step in self.steps:
            if step.name in seen or step.name == "day":
                raise ValueError(f"step {step.name}: this name is taken")
            for need in step.needs:
                if need not in seen:
                    raise ValueError(f"step {step.name}: needs {need}, which is no step before it")
            seen[step.name] = step.kind
        for row in self.table:
            for step_name, fact in row.fields():
                kind = "day" if step_name == "day" else seen.get(step_name)
                if kind is None or fact not in facts.names(kind):
                    raise ValueError(f"table, {row.what}: no fact {step_name}[{fact}]")
        return self

    def chosen(self, only: Sequence[str]) -> tuple[Step, ...]:
        """The steps of these names and what they need, in the day's order; all where none is named. Raises DayError."""
        by_name = {step.name: step for step in self.steps}
        unknown = next((name for name in only if name not in by_name), None)
        if unknown is not None:
            raise DayError(f"--only {unknown}: no step of {self.name}; there are {', '.join(by_name)}")
        wanted = set(only or by_name)
        for step in reversed(self.steps):
            if step.name in wanted:
                wanted.update(step.needs)
        return tuple(step for step in self.steps if step.name in wanted)


def days() -> Mapping[str, Path]:
    """The days that ship, by name."""
    return {path.stem: path for path in sorted(Path(str(resources.files(__package__))).glob("*.yaml"))}


def read(path: Path) -> Day:
    """Raises DayError."""
    try:
        return Day.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise DayError(f"{path}: not YAML: {error}") from error
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'day'}: {one['msg'].removeprefix('Value error, ')}" for one in error.errors())
        raise DayError(f"{path}: {told}") from error
