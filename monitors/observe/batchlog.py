"""Read a log in the words of a dialect: batch lines, lines with a meaning of their own, tracebacks.

Pure: text in, values out. A line that cannot be read is counted, never fatal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from monitors.engines import Dialect
from monitors.judge.scene import BatchLine, Cite, Log, Notice, Traceback

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PAIR = re.compile(r"(?P<k>[#A-Za-z][^:,]*?): (?P<v>-?\d+(?:\.\d+)?%?|True|False|nan)(?=,|\s*$)")
_EXCEPTION = re.compile(
    r"^(?:\[[^\]]*\] )?(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Iteration|Cancelled\w*)?)(?:: (?P<text>.*))?$"
)
_TRACEBACK = "Traceback (most recent call last):"
_MOST_TRACEBACK_LINES = 400
_LONGEST_LINE = 8192  # what a pattern is tried on: a line of megabytes is no line that means something
_NOWHERE = Cite("")


@dataclass(frozen=True)
class Entry:
    """One line of a log. ``invocation`` and ``pid`` come from a journal."""

    text: str
    line: int
    invocation: str = ""
    pid: str = ""


def pairs(text: str) -> dict[str, float]:
    """The numbers of a batch line by their key; ``nan`` and switches are left out."""
    found: dict[str, float] = {}
    for match in _PAIR.finditer(text):
        value = match["v"].rstrip("%")
        if value not in ("True", "False", "nan"):
            found[match["k"].strip()] = float(value)
    return found


def batch_line(text: str, dialect: Dialect, cite: Cite = _NOWHERE) -> BatchLine | None:
    """The batch line that a text is, or None."""
    grammar = dialect.log
    match = grammar.line.search(text)
    if match is None:
        return None
    groups = {key: value for key, value in match.groupdict().items() if value is not None}
    values = pairs(groups["kv"]) if "kv" in groups else {k: float(v) for k, v in groups.items() if re.fullmatch(r"\d+(?:\.\d+)?", v)}

    def total(keys: tuple[str, ...]) -> float:
        return sum(values.get(key, 0.0) for key in keys)

    pending = [values[key] for key in grammar.pending if key in values]
    progress = total(grammar.throughput) > 0 if grammar.throughput else True
    return BatchLine(groups.get("kind", "stats"), groups.get("ts", ""), total(grammar.running), total(grammar.waiting),
                     sum(pending) if pending else None, progress, cite)  # fmt: skip


@dataclass
class _Reader:
    dialect: Dialect
    artefact: str
    batches: list[BatchLine] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    open: dict[str, list[Entry]] = field(default_factory=dict)  # unfinished tracebacks by process
    lines: int = 0
    skipped: int = 0

    def take(self, entry: Entry) -> None:
        self.lines += 1
        text = _ANSI.sub("", entry.text).rstrip()
        # A progress bar rewrites its line: what stands after the last carriage return is what was last to be seen.
        text = text.rsplit("\r", 1)[-1][:_LONGEST_LINE]
        cite = Cite(self.artefact, entry.line)
        if entry.invocation and entry.invocation not in self.starts:
            self.starts.append(entry.invocation)
        if self._traceback(Entry(text, entry.line, entry.invocation, entry.pid)):
            return
        found = batch_line(text, self.dialect, cite)
        if found:
            self.batches.append(found)
            return
        for rule in self.dialect.notices:
            match = rule.pattern.search(text)
            if match:
                fields = {k: v for k, v in match.groupdict().items() if v is not None}
                self.notices.append(Notice(rule.kind, text.strip()[:400], fields, entry.invocation, cite))
                return
        self.skipped += 1

    def _traceback(self, entry: Entry) -> bool:
        """Collect the lines of a traceback; the first line that is neither indented nor empty is its exception."""
        lines = self.open.get(entry.pid)
        if _TRACEBACK in entry.text:
            if lines:
                self._finish(entry.pid)
            self.open[entry.pid] = [entry]
            return True
        if lines is None:
            return False
        if entry.text.startswith((" ", "\t")) or not entry.text.strip():
            if len(lines) < _MOST_TRACEBACK_LINES:
                lines.append(entry)
            return True
        found = _EXCEPTION.match(entry.text)
        if found and not batch_line(entry.text, self.dialect):
            lines.append(entry)
            self._finish(entry.pid, found["kind"], found["text"] or "")
            return True
        self._finish(entry.pid)
        return False

    def _finish(self, pid: str, kind: str = "", message: str = "") -> None:
        lines = self.open.pop(pid)
        text = "\n".join(line.text for line in lines)
        self.tracebacks.append(Traceback(text, kind, message, lines[0].invocation, Cite(self.artefact, lines[0].line)))

    def end(self) -> Log:
        for pid in list(self.open):
            self._finish(pid)
        return Log(
            self.artefact, tuple(self.batches), tuple(self.notices), tuple(self.tracebacks), tuple(self.starts), self.lines, self.skipped
        )


def read(entries: Iterable[Entry], dialect: Dialect, artefact: str) -> Log:
    """A whole log in order."""
    reader = _Reader(dialect, artefact)
    for entry in entries:
        reader.take(entry)
    return reader.end()


def read_text(data: bytes, dialect: Dialect, artefact: str) -> Log:
    """A log file's bytes; bytes that are no UTF-8 are replaced."""
    lines = data.decode(errors="replace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return read((Entry(text, number) for number, text in enumerate(lines, 1)), dialect, artefact)


def read_journal(data: bytes, dialect: Dialect, artefact: str) -> Log:
    """``journalctl -o json`` output: one object a line."""
    found = (journal_entry(text, number) for number, text in enumerate(data.decode(errors="replace").splitlines(), 1))
    return read((entry for entry in found if entry is not None), dialect, artefact)


def journal_entry(text: str, number: int) -> Entry | None:
    """One journal record; None when the line is no object (cut, or not from a journal)."""
    try:
        raw = json.loads(text)
    except ValueError:
        return None
    return record_entry(raw, number) if isinstance(raw, dict) else None


def record_entry(raw: Mapping[str, object], number: int) -> Entry:
    """A message with colour codes arrives as a list of byte values; one that is too long arrives as null."""
    message = raw.get("MESSAGE")
    if isinstance(message, list):
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode(errors="replace")
    invocation = raw.get("_SYSTEMD_INVOCATION_ID") or raw.get("INVOCATION_ID") or ""
    return Entry("" if message is None else str(message), number, str(invocation), str(raw.get("_PID", "")))
