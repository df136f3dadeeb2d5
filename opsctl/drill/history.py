"""Scores that were kept: one line of JSON for each drill or whole day that was played, in the state folder."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from monitors import fleet
from opsctl.drill.score import Score
from opsctl.load.figures import Spread
from opsctl.load.plot import Curve, chart


def path_of(env: Mapping[str, str]) -> Path:
    return fleet.state_root(env) / "drills" / "history.jsonl"


def add(path: Path, score: Score) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        cut = bool(size) and os.pread(file.fileno(), 1, size - 1) != b"\n"  # a crash left half a line: it costs itself only
        file.write(b"\n" * cut + msgspec.json.encode(score) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Score]:
    """Oldest first. A line that a crash cut short is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Score))
        except msgspec.DecodeError:
            continue
    return found


class Due(msgspec.Struct, frozen=True):
    """``days`` until it is due again: below zero it is overdue, None when it was never played."""

    drill: str
    last_utc: str
    passed: bool | None
    every_days: int
    days: int | None


def calendar(every_days: Mapping[str, int], scores: Sequence[Score], today: datetime.date) -> list[Due]:
    """What is due when, the most overdue first. Only a drill that passed counts as played. ``every_days``: how often each is
    to be played, by name."""
    found = []
    for name, days_between in every_days.items():
        mine = [score for score in scores if score.drill == name]
        good = [score for score in mine if score.passed]
        days = None
        if good:
            last = datetime.datetime.fromisoformat(good[-1].began_utc).date()
            days = (last - today).days + days_between
        found.append(Due(name, mine[-1].began_utc if mine else "", mine[-1].passed if mine else None, days_between, days))
    return sorted(found, key=lambda one: (one.days is not None, one.days or 0, one.drill))


def trend(scores: Sequence[Score], moments: Sequence[str] = ("detected", "captured", "mitigated", "recovered")) -> str:
    """A chart as SVG: the seconds of each moment over the runs of one drill."""
    curves = []
    for name in moments:
        came = [(at, getattr(score.moments, name)) for at, score in enumerate(scores, 1)]
        points = tuple((float(at), Spread.of([value])) for at, value in came if value is not None)
        if points:
            curves.append(Curve(name, points))
    return chart(tuple(curves), f"{scores[0].drill}: seconds after the injection", "run")
