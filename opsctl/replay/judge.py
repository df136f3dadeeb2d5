"""Whether a step showed what it should, and the table at the end. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from opsctl.replay.document import Day, Row, Tolerance
from opsctl.replay.facts import Whole


class Outcome(msgspec.Struct, frozen=True):
    """How one step went. ``problems``: what it should have shown and did not; empty when it did. ``skipped``: why it was
    not played."""

    step: str
    says: str
    seconds: float
    facts: dict[str, Any]
    problems: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def good(self) -> bool:
        return not self.problems and not self.skipped


def problems(holds: Mapping[str, Tolerance], facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What does not hold, one line each."""
    found = (_wrong(name, tolerance, facts[name]) for name, tolerance in holds.items())
    return tuple(text for text in found if text)


def _wrong(name: str, tolerance: Tolerance, value: Any) -> str:
    if tolerance.equals is not None:
        return "" if value == tolerance.equals else f"{name} is {_shown(value)}, and must be {_shown(tolerance.equals)}"
    if tolerance.one_of:
        return "" if value in tolerance.one_of else f"{name} is {_shown(value)}, and must be {' or '.join(tolerance.one_of)}"
    least, most = tolerance.least, tolerance.most
    if isinstance(value, int | float) and (least is None or value >= least) and (most is None or value <= most):
        return ""
    wanted = " and ".join([*([f"at least {least:g}"] if least is not None else []), *([f"at most {most:g}"] if most is not None else [])])
    return f"{name} is {_shown(value)}, and must be {wanted}"


def _shown(value: Any) -> str:
    return "not measured" if value is None else "empty" if value == "" else f"{value:g}" if isinstance(value, float) else str(value)


NOT_PLAYED, NOT_MEASURED = "not played", "not measured"


def cell(text: str, facts: Mapping[str, Mapping[str, Any]]) -> str:
    """A cell filled in; ``not played`` when a step that it reads of was not, ``not measured`` when one found no figure."""
    try:
        return text.format_map(facts)
    except KeyError:
        return NOT_PLAYED
    except (TypeError, ValueError):
        return NOT_MEASURED


def rows(day: Day, outcomes: Sequence[Outcome], whole: Whole) -> list[tuple[str, str, str, str]]:
    """(what, that day, ours, scaled) of each line of the table."""
    facts = {outcome.step: outcome.facts for outcome in outcomes if outcome.facts} | {"day": msgspec.to_builtins(whole)}
    return [(row.what, row.then, cell(row.ours, facts), _scaled(row, facts)) for row in day.table]


def _scaled(row: Row, facts: Mapping[str, Mapping[str, Any]]) -> str:
    return cell(row.scaled, facts) if row.scaled else "no"


def table(day: Day, outcomes: Sequence[Outcome], whole: Whole) -> str:
    """Markdown: what is told on a terminal is what is kept."""
    head = ["", "that day", "ours", "scaled"]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows(day, outcomes, whole))]
    return "\n".join(lines)


def steps(outcomes: Sequence[Outcome]) -> str:
    """One line a step."""
    width = max((len(outcome.step) for outcome in outcomes), default=0)
    lines = []
    for outcome in outcomes:
        mark = "ok    " if outcome.good else "-     " if outcome.skipped else "FAILED"
        lines.append(f"{mark} {outcome.step:<{width}} {outcome.seconds:5.0f} s  {outcome.says}")
        lines += [f"{'':<{width + 16}}{text}" for text in (*outcome.problems, *((outcome.skipped,) if outcome.skipped else ()))]
    return "\n".join(lines)
