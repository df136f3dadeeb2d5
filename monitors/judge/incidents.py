"""When is something declared, and when is it over? Pure: a book of what is open, and the decision of each turn.

One wedge is one incident however often the monitor restarts: its key is the invocation and the step at which it
stands. A process that ends after its wedge was declared belongs to that incident.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from monitors.judge import ending
from monitors.judge.progress import Judgement, Sample, State

SERVES = (State.busy, State.slow, State.idle)
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
    """``ends`` are the times at which invocations ended, newest last, and ``causes`` of what; ``paged`` is when each page key
    went out; ``told`` is the title of the page whose end nobody has been told of; ``named`` is the invocation whose wedge was
    declared last; ``starting``: whoever was paged has heard that the server is started again, and not yet that it serves."""

    open: Incident | None = None
    ends: tuple[float, ...] = ()
    paged: Mapping[str, float] = field(default_factory=dict)
    told: str = ""
    causes: tuple[str, ...] = ()
    named: str = ""
    starting: bool = False

    def to_json(self) -> dict[str, Any]:
        opened = asdict(self.open) if self.open else None
        return {"open": opened, "ends": list(self.ends), "causes": list(self.causes), "paged": dict(self.paged), "told": self.told,
                "named": self.named, "starting": self.starting}  # fmt: skip

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Book:
        opened = Incident(**raw["open"]) if raw["open"] else None
        return Book(opened, tuple(raw["ends"]), dict(raw["paged"]), str(raw.get("told", "")), tuple(raw.get("causes", ())),
                    str(raw.get("named", "")), bool(raw.get("starting")))  # fmt: skip

    @property
    def row(self) -> int:
        """How many ends of one kind make a row: those of the last one's cause, itself among them."""
        causes = [cause for _, cause in _timed(self)]
        return sum(ending.alike(cause, causes[-1]) for cause in causes) if causes else 0


def _timed(book: Book) -> list[tuple[float, str]]:
    """Each end with its cause; nothing is known of those that an older monitor wrote down."""
    unknown = ("",) * (len(book.ends) - len(book.causes))
    return list(zip(book.ends, (*unknown, *book.causes), strict=True))


def resumed(book: Book, alarming: Callable[[str], bool]) -> Book:
    """The book of a monitor that starts again. An incident whose capture or page had not been finished is taken out,
    so that it is declared, captured and paged anew; one that was paged (or pages nobody) stays and stays quiet."""
    opened = book.open
    if opened is None:
        return book
    finished = bool(opened.bundle) and (not alarming(opened.verdict) or page_key(opened, opened.verdict) in book.paged)
    # The time of its end stays with a crash that is counted again, or two restarts of a monitor would make a loop.
    timed = _timed(book) if finished or opened.kind != "crash" else _timed(book)[:-1]
    ends, causes = tuple(at for at, _ in timed), tuple(cause for _, cause in timed)
    return book if finished else replace(book, open=None, ends=ends, causes=causes)


def decide(book: Book, judgement: Judgement, sample: Sample, now_unix_s: float, cause: str = "") -> tuple[Book, Decision]:
    """What this turn's judgement means for the book. ``cause``: of what a server that ends now dies, by its log."""
    opened = book.open
    if judgement.state is State.ended:
        if opened and opened.invocation == sample.invocation:
            if opened.kind == "wedge":
                after = replace(opened, kind="crash")
                return replace(book, open=after), Decision.ended
            return book, Decision.none
        if not judgement.changed:
            return book, Decision.none
        if cause == ending.WATCHDOG and sample.invocation and book.named == sample.invocation:
            return book, Decision.ended  # it moved for a moment while it was killed; it dies of the wedge all the same
        # A clock that was set back leaves times in the future: they are of no use, and must not count for ever.
        timed = [*((at, why) for at, why in _timed(book) if abs(now_unix_s - at) < _LOOP_WINDOW_S), (now_unix_s, cause)]
        incident = Incident("crash", f"crash:{sample.invocation}", sample.invocation, now_unix_s)
        ends, causes = tuple(at for at, _ in timed), tuple(why for _, why in timed)
        return replace(book, open=incident, ends=ends, causes=causes), Decision.declare_crash
    if judgement.state is State.stalled:
        key = f"wedge:{sample.invocation}:{sample.steps}"
        if opened and opened.key == key:
            return book, Decision.none
        if opened and opened.kind == "wedge" and opened.invocation == sample.invocation and not judgement.changed:
            return book, Decision.none
        wedge = Incident("wedge", key, sample.invocation, now_unix_s)
        return replace(book, open=wedge, named=sample.invocation), Decision.declare_wedge
    if opened is None or judgement.state is State.unknown:
        return book, Decision.none
    serves = judgement.state in SERVES
    # Where starts have no names, one that serves again is another than the one that died.
    if opened.invocation != sample.invocation or (opened.kind == "crash" and not sample.invocation and serves and judgement.changed):
        return replace(book, open=None), Decision.restarted
    if opened.kind == "wedge" and serves and judgement.changed:
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
    return replace(book, paged={**kept, key: now_unix_s}, told=title, starting=False)
