"""The pager of one deployment: who is told of an incident, once; what could not be sent is tried again; silences,
acknowledgements and reminders; and the word that it is over.

What was paged stands in the book of incidents, which lives on disk: a monitor that is started again pages nothing twice
and still owes whoever was woken the word that it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from monitors import fleet, page, silences
from monitors.capture.manifest import utc
from monitors.judge import incidents
from monitors.judge.incidents import Book, Decision, Incident
from monitors.judge.verdict import Class

_AGAIN_S = 60.0


@dataclass(frozen=True)
class _Unsent:
    """A page that is due. ``last_s`` is when it was last tried, on the monotonic clock."""

    key: str
    title: str
    body: str
    kind: page.Kind = "failure"
    tries: int = 0
    last_s: float = 0.0


class Pager:
    """Each method takes the book as it stands and gives it back with what has been paged. ``emit(event, **fields)``
    takes what is told of it. ``state_dir`` holds silences and acknowledgements."""

    def __init__(self, whole: fleet.Fleet, deployment: str, state_dir: Path, emit: Callable[..., None]) -> None:
        self._settings = whole.page
        self._deployment = deployment
        self._emit = emit
        self._silences = state_dir / "silences.json"
        self._acks = state_dir / "acknowledged.json"
        self._unsent: _Unsent | None = None

    def page(self, book: Book, verdict: str, body: str, incident: Incident | None) -> Book:
        """Page for a verdict, unless it is silenced or this incident has been paged already."""
        quiet = silences.active(silences.load(self._silences), self._deployment, verdict, time.time())
        if quiet is not None:
            until = utc(quiet.until_unix_s)
            self._emit("page", page_sent=None, reason=f"silenced until {until} by {quiet.who}: {quiet.why}", title=verdict)
            return book
        key = incidents.page_key(incident, verdict) if incident else f"recovered:{verdict}"
        if not incidents.page_due(book, key, time.time()):
            self._emit("page", page_sent=None, reason="this incident has been paged already")
            return book
        self._unsent = _Unsent(key, f"{self._deployment}: {verdict}", body, _kind(verdict))
        return self._send(book)

    def again(self, book: Book, mono_s: float) -> Book:
        """A page that did not go out is tried again each minute: the network may be part of the incident."""
        if self._unsent is not None and self._settings.urls and mono_s - self._unsent.last_s >= _AGAIN_S:
            return self._send(book)
        return book

    def remind(self, book: Book, now_unix_s: float) -> Book:
        """An open incident that was paged and that nobody has acknowledged is paged again, where the fleet file asks for it."""
        opened, every_s = book.open, self._settings.remind_s
        if not every_s or opened is None or not opened.verdict or self._unsent is not None:
            return book
        key = incidents.page_key(opened, opened.verdict)
        paged_at = book.paged.get(key)
        if paged_at is None or abs(now_unix_s - paged_at) < every_s or silences.acknowledged(self._acks, self._deployment, paged_at):
            return book
        if silences.active(silences.load(self._silences), self._deployment, opened.verdict, now_unix_s) is not None:
            return book
        words = f"Still open and not acknowledged. bundle: {opened.bundle}"
        self._unsent = _Unsent(key, f"{self._deployment}: {opened.verdict}", words, _kind(opened.verdict))
        return self._send(book)

    def restarting(self, book: Book) -> Book:
        """Whoever was paged hears once that the server is started again. It may take long to load, and may not come up."""
        if not book.told or book.starting or not self._settings.recovery:
            return book
        words = f"{self._deployment} was started again and is not ready yet."
        told = page.send(self._settings.urls, f"restarting: {book.told}", words)
        self._emit("restarting_notice", sent=told.sent, reason=told.reason)
        return replace(book, starting=True)

    def over(self, book: Book, decision: Decision) -> Book:
        """Whoever was paged hears that it is over. No page: nobody is woken for it, and it is not tried again."""
        if decision not in (Decision.recovered, Decision.restarted) or not book.told or not self._settings.recovery:
            return book
        words = "makes progress again" if decision is Decision.recovered else "was started again and serves"
        told = page.send(self._settings.urls, f"over: {book.told}", f"{self._deployment} {words}.", kind="success")
        self._emit("recovery_notice", sent=told.sent, reason=told.reason)
        return replace(book, told="", starting=False)

    def _send(self, book: Book) -> Book:
        assert self._unsent is not None
        due = self._unsent
        result = page.send(self._settings.urls, due.title, due.body, kind=due.kind)
        if result.sent:
            book, self._unsent = incidents.with_page(book, due.key, due.title, time.time()), None
        else:
            self._unsent = replace(due, tries=due.tries + 1, last_s=time.monotonic())
        self._emit("page", page_sent=result.sent, reason=result.reason, title=due.title, tries=due.tries + 1)
        return book


def _kind(verdict: str) -> page.Kind:
    """What stands still or is dead is a failure; what answers wrongly is a warning."""
    return "failure" if Class(verdict).is_dead else "warning"
