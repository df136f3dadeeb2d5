"""Read a log in the words of a dialect: batch lines, lines with a meaning of their own, access lines, tracebacks.

Pure: text in, values out. A line that cannot be read is counted, never fatal.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from monitors.engines import Dialect
from monitors.judge.moment import Moment
from monitors.judge.scene import Access, BatchLine, Cite, Log, Notice, Repeat, Traceback
from monitors.observe.envelope import Opened, message_of, unwrap
from monitors.observe.stamps import from_epoch

_PAIR = re.compile(r"(?P<k>[#A-Za-z][^:,]{0,80}?): (?P<v>-?\d+(?:\.\d+)?%?|True|False|nan)(?=,|\. |\s*\.?$)")
_EXCEPTION = re.compile(r"^(?P<kind>[A-Za-z_][\w.]{0,200})(?:: (?P<text>.*))?$")
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")
_TRACEBACK = "Traceback (most recent call last):"
_ACCESS = re.compile(
    r'"(?P<m>GET|POST|PUT|DELETE|HEAD) (?P<r>/[^\s?"]{0,200})[^"]{0,200}" (?P<s>\d{3})\b'
    r"|request: (?P<m2>GET|POST) (?P<r2>/\S{0,200}) [\d.]{1,15} (?P<s2>\d{3})\b"
    r'|status=(?P<s3>\d{3}) method="(?P<m3>[A-Z]+)" path="(?P<r3>/[^"]{0,200})"'
)
# opsctl's supervisor names the start where a log is a file, as a journal does for each of its entries.
_NAMED_START = re.compile(r"\[opsctl\] Started \S.{0,200}: main process \d+, invocation (?P<id>[0-9a-f]{32})\.")
_MOST_TRACEBACK_LINES = 400
_MOST_ACCESSES = 2000
_REPEATS = 5  # so many equal lines at the end are a repetition
_REPEATS_KEPT = 512
_STAMPED = re.compile(r"[\dT:.,Z/-]{8,40}|0x[0-9a-fA-F]+")
_NOWHERE = Cite("")


@dataclass(frozen=True)
class Entry:
    """One line of a log. ``invocation``, ``pid`` and ``moment`` come from a journal."""

    text: str
    line: int
    invocation: str = ""
    pid: str = ""
    moment: Moment | None = None


def pairs(text: str) -> dict[str, float]:
    """The numbers of a batch line by their key; ``nan`` and switches are left out. Old versions write underscores and
    dots where newer ones write hyphens and commas."""
    found: dict[str, float] = {}
    for match in _PAIR.finditer(text):
        value = match["v"].rstrip("%")
        if value not in ("True", "False", "nan"):
            key = match["k"].strip(" .")
            found[key.replace("_", "-") if key.startswith("#") else key] = float(value)
    return found


def batch_line(text: str, dialect: Dialect, cite: Cite = _NOWHERE) -> BatchLine | None:
    """The batch line that a text is, or None."""
    grammar = dialect.log
    match = next((found for form in grammar.line if (found := form.search(text))), None)
    if match is None:
        return None
    groups = {key: value for key, value in match.groupdict().items() if value is not None}
    values = {k: float(v) for k, v in groups.items() if _NUMBER.fullmatch(v)}
    if "kv" in groups:
        values |= pairs(groups["kv"])

    def total(keys: tuple[str, ...]) -> float:
        return sum(values.get(key, 0.0) for key in keys)

    pending = [values[key] for key in grammar.pending if key in values]
    # A form of a timer says so by its own numbers; a form without them is printed when something was done.
    timed = grammar.throughput and any(key in values for key in grammar.throughput)
    progress = total(grammar.throughput) > 0 if timed else "idle" not in groups
    return BatchLine(groups.get("kind", "stats"), groups.get("ts", ""), total(grammar.running), total(grammar.waiting),
                     sum(pending) if pending else None, progress, cite, values=values, who=groups.get("eng", ""))  # fmt: skip


@dataclass
class _Reader:
    dialect: Dialect
    artefact: str
    batches: list[BatchLine] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    starts: dict[str, None] = field(default_factory=dict)
    open: dict[str, list[tuple[str, Entry]]] = field(default_factory=dict)  # unfinished tracebacks by process
    accesses: deque[Access] = field(default_factory=lambda: deque(maxlen=_MOST_ACCESSES))
    tail: deque[tuple[str, Moment | None, int]] = field(default_factory=lambda: deque(maxlen=_REPEATS_KEPT))
    last: Moment | None = None
    named: str = ""
    lines: int = 0
    skipped: int = 0

    def take(self, entry: Entry) -> None:
        self.lines += 1
        if not entry.invocation:
            start = _NAMED_START.match(entry.text)
            self.named = start["id"] if start else self.named
            entry = replace(entry, invocation=self.named) if self.named else entry
        if entry.invocation:
            self.starts.setdefault(entry.invocation)
        known = [self._one(entry, opened) for opened in unwrap(entry.text, entry.pid)]
        self.skipped += not any(known)

    def _one(self, entry: Entry, line: Opened) -> bool:
        cite = Cite(self.artefact, entry.line)
        # A journal's own time is UTC; what a line says of itself is only as good as its zone.
        moment = entry.moment or line.moment
        self.last = moment or self.last
        if self._traceback(line, entry):
            return True
        found = batch_line(line.text, self.dialect, cite)
        if found:
            self.batches.append(replace(found, moment=moment, who=found.who or line.ranks))
            self.tail.clear()
            return True
        access = _ACCESS.search(line.text)
        if access:
            groups = [access[name] or access[f"{name}2"] or access[f"{name}3"] for name in "mrs"]
            self.accesses.append(Access(groups[0], groups[1], int(groups[2]), cite, moment))
            return True
        for rule in self.dialect.notices:
            match = rule.pattern.search(line.text)
            if match:
                fields = {k: v for k, v in match.groupdict().items() if v is not None}
                self.notices.append(Notice(rule.kind, line.text.strip()[:400], fields, entry.invocation, cite, moment))
                self.tail.clear()
                return True
        if line.body.strip():
            self.tail.append((_STAMPED.sub("", line.body), moment, entry.line))
        return False

    def _traceback(self, line: Opened, entry: Entry) -> bool:
        """Collect the lines of a traceback; the first line that is neither indented nor empty is its exception."""
        key = line.process
        lines = self.open.get(key)
        if _TRACEBACK in line.body:
            if lines:
                self._finish(key)
            self.open[key] = [(line.body, entry)]
            return False  # what stands before it on the line ("Scheduler hit an exception: ...") has its own meaning
        if lines is None:
            return False
        if line.body.startswith((" ", "\t")) or not line.body.strip():
            if len(lines) < _MOST_TRACEBACK_LINES:
                lines.append((line.body, entry))
            return True
        found = _EXCEPTION.match(line.body)
        # One bare word that is no exception's name is a line of somebody else: the traceback's own was cut.
        named = found is not None and (found["text"] is not None or re.search(r"(?:Error|Exception|Exit|Interrupt|\.\w+)$", found["kind"]))
        if found and named and not batch_line(line.text, self.dialect):
            lines.append((line.body, entry))
            self._finish(key, found["kind"], found["text"] or "")
            return False  # an exception may itself be a line with a meaning: out of memory, a call that timed out
        self._finish(key)
        return False

    def _finish(self, key: str, kind: str = "", message: str = "") -> None:
        lines = self.open.pop(key)
        text = "\n".join(body for body, _ in lines)
        first = lines[0][1]
        self.tracebacks.append(Traceback(text, kind, message, first.invocation, Cite(self.artefact, first.line)))

    def _repeat(self) -> Repeat | None:
        if not self.tail:
            return None
        words = self.tail[-1][0]
        same = list(itertools.takewhile(lambda item: item[0] == words, reversed(self.tail)))
        if len(same) < _REPEATS:
            return None
        first, last = same[-1], same[0]
        span = last[1].since(first[1]) if first[1] and last[1] else None
        return Repeat(words.strip()[:200], len(same), (len(same) - 1) / span if span and span > 0 else None, Cite(self.artefact, last[2]))

    def end(self) -> Log:
        for key in list(self.open):
            self._finish(key)
        return Log(
            self.artefact, tuple(self.batches), tuple(self.notices), tuple(self.tracebacks), tuple(self.starts), self.lines, self.skipped,
            tuple(self.accesses), self._repeat(), self.last, _role(self.artefact),
        )  # fmt: skip


def _role(artefact: str) -> str:
    """What a log's name says of the server that wrote it."""
    return next((role for role in ("prefill", "decode", "router", "proxy", "client") if role in artefact.lower()), "")


def read(entries: Iterable[Entry], dialect: Dialect, artefact: str) -> Log:
    """A whole log in order."""
    reader = _Reader(dialect, artefact)
    for entry in entries:
        reader.take(entry)
    return reader.end()


def read_text(data: bytes, dialect: Dialect, artefact: str) -> Log:
    """A log file's bytes; bytes that are no UTF-8 are replaced. A log service that gives the newest line first is
    turned round."""
    lines = data.decode(errors="replace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    entries = [Entry(text, number) for number, text in enumerate(lines, 1)]
    if _newest_first(lines):
        entries.reverse()
    return read(entries, dialect, artefact)


def _newest_first(lines: list[str]) -> bool:
    """Whether times fall along the file, and never rise. One step back is a paste of two sessions, not an order."""
    moments = [moment for line in lines[:200] if (moment := unwrap(line)[-1].moment)]
    steps = [later.since(earlier) for earlier, later in itertools.pairwise(moments)]
    back, forth = sum(1 for s in steps if s is not None and s < 0), sum(1 for s in steps if s is not None and s > 0)
    return forth == 0 and (back >= 2 or (back == 1 and len(moments) >= 4 and "\t" in lines[0]))


def read_journal(data: bytes, dialect: Dialect, artefact: str) -> Log:
    """``journalctl -o json`` output: one object a line."""
    found = (journal_entry(text, number) for number, text in enumerate(data.decode(errors="replace").splitlines(), 1))
    return read((entry for entry in found if entry is not None), dialect, artefact)


def journal_entry(text: str, number: int) -> Entry | None:
    """One journal record; None when the line is no object (cut, or not from a journal)."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record_entry(raw, number) if isinstance(raw, dict) else None


def record_entry(raw: Mapping[str, object], number: int) -> Entry:
    """A message with colour codes arrives as a list of byte values; one that is too long arrives as null."""
    message = raw.get("MESSAGE")
    if isinstance(message, list):
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode(errors="replace")
    if message is None and "MESSAGE" not in raw:
        message = message_of(raw)  # a container's records in the same file
    invocation = raw.get("_SYSTEMD_INVOCATION_ID") or raw.get("INVOCATION_ID") or ""
    moment = from_epoch(raw.get("__REALTIME_TIMESTAMP"))
    return Entry("" if message is None else str(message), number, str(invocation), str(raw.get("_PID", "")), moment)
