"""When is something declared, and when is it over? Pure: a book of what is open, and the decision of each turn.

One wedge is one incident however often the monitor restarts: its key is the invocation and the step at which it
stands. A process that ends after its wedge was declared belongs to that incident.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from monitors.judge.progress import Judgement, Sample, State

_LOOP_WINDOW_S = 900.0


class Decision(enum.StrEnum):
    none = "none"
    declare_wedge = "declare_wedge"
    declare_crash = "declare_crash"
    recovered = "recovered"
    ended = "ended"
    restarted = "restarted"


@dataclass(frozen=True)
class Incident:
    kind: str  # wedge | crash
    key: str
    invocation: str
    declared_unix_s: float
    bundle: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Book:
    """``ends`` are the times at which invocations ended, newest last; ``paged`` is when each page key went out; ``told`` is
    the title of the page whose end nobody has been told of."""

    open: Incident | None = None
    ends: tuple[float, ...] = ()
    paged: Mapping[str, float] = field(default_factory=dict)
    told: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"open": asdict(self.open) if self.open else None, "ends": list(self.ends), "paged": dict(self.paged), "told": self.told}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Book:
        return Book(Incident(**raw["open"]) if raw["open"] else None, tuple(raw["ends"]), dict(raw["paged"]), str(raw.get("told", "")))


def resumed(book: Book, alarming: Callable[[str], bool]) -> Book:
    """The book of a monitor that starts again. An incident whose capture or page had not been finished is taken out,
    so that it is declared, captured and paged anew; one that was paged (or pages nobody) stays and stays quiet."""
    opened = book.open
    if opened is None:
        return book
    finished = bool(opened.bundle) and (not alarming(opened.verdict) or page_key(opened, opened.verdict) in book.paged)
    # The time of its end stays with a crash that is counted again, or two restarts of a monitor would make a loop.
    ends = book.ends if finished or opened.kind != "crash" else book.ends[:-1]
    return book if finished else replace(book, open=None, ends=ends)


def decide(book: Book, judgement: Judgement, sample: Sample, now_unix_s: float) -> tuple[Book, Decision]:
    """What this turn's judgement means for the book."""
    opened = book.open
    if judgement.state is State.ended:
        if opened and opened.invocation == sample.invocation:
            if opened.kind == "wedge":
                after = replace(opened, kind="crash")
                return replace(book, open=after), Decision.ended
            return book, Decision.none
        if not judgement.changed:
            return book, Decision.none
        # A clock that was set back leaves times in the future: they are of no use, and must not count for ever.
        ends = (*(t for t in book.ends if abs(now_unix_s - t) < _LOOP_WINDOW_S), now_unix_s)
        incident = Incident("crash", f"crash:{sample.invocation}", sample.invocation, now_unix_s)
        return replace(book, open=incident, ends=ends), Decision.declare_crash
    if judgement.state is State.stalled:
        key = f"wedge:{sample.invocation}:{sample.steps}"
        if opened and opened.key == key:
            return book, Decision.none
        if opened and opened.kind == "wedge" and opened.invocation == sample.invocation and not judgement.changed:
            return book, Decision.none
        return replace(book, open=Incident("wedge", key, sample.invocation, now_unix_s)), Decision.declare_wedge
    if opened is None or judgement.state is State.unknown:
        return book, Decision.none
    if opened.invocation != sample.invocation:
        return replace(book, open=None), Decision.restarted
    if opened.kind == "wedge" and judgement.state in (State.busy, State.slow, State.idle) and judgement.changed:
        return _maybe_recovered(book, opened, sample)
    return book, Decision.none


def _maybe_recovered(book: Book, opened: Incident, sample: Sample) -> tuple[Book, Decision]:
    """A monitor that has just started calls a wedged server busy until it has watched it long enough: only another
    step than the incident's is a recovery. (Where no step is known, leaving the stalled state is one.)"""
    if sample.steps is not None and opened.key == f"wedge:{sample.invocation}:{sample.steps}" and sample.held:
        return book, Decision.none
    return replace(book, open=None), Decision.recovered


def page_due(book: Book, key: str, now_unix_s: float) -> bool:
    """Whether a page of this key has not gone out within the window of a crash loop. A clock that was set back by more
    than that window makes it due: a page too many is better than one too few."""
    return key not in book.paged or abs(now_unix_s - book.paged[key]) >= _LOOP_WINDOW_S


def page_key(incident: Incident, verdict: str) -> str:
    """A wedge pages once, its death included. Crashes page by class, so that a loop pages once as a crash and once as a loop."""
    return incident.key if incident.key.startswith("wedge:") else f"crash:{verdict}"


def with_page(book: Book, key: str, title: str, now_unix_s: float) -> Book:
    kept = {k: t for k, t in book.paged.items() if abs(now_unix_s - t) < 7 * 86400}
    return replace(book, paged={**kept, key: now_unix_s}, told=title)
