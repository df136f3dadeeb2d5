"""Judge every case folder under a root and hold the verdicts against what each folder's ``case.yaml`` expects.

``case.yaml`` is opened here and nowhere else: the judge never sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monitors import casefolder
from monitors.judge.verdict import Class, Verdict

LOW = 0.5  # a confidence below this says that another class is nearly as likely
_KEY = re.compile(r"^(?P<key>[a-z_]+):\s*(?P<value>.*)$")
_COMMENT = re.compile(r"\s+#.*$")


class ExpectationError(ValueError):
    """A case.yaml cannot be used; the text names the file and what is wrong."""


@dataclass(frozen=True)
class Expectation:
    """``score`` is false where an expert could not decide from the files: there doubt is the right answer."""

    verdict: Class
    acceptable: tuple[Class, ...] = ()
    must_say: tuple[str, ...] = ()
    score: bool = True


@dataclass(frozen=True)
class Row:
    case: str
    wanted: Expectation
    found: Verdict
    unsaid: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.unsaid and (self._right if self.wanted.score else self._doubts)

    @property
    def _right(self) -> bool:
        return self.found.verdict in (self.wanted.verdict, *self.wanted.acceptable)

    @property
    def _doubts(self) -> bool:
        """``hang_unknown`` or a low confidence, and a word on what would decide."""
        unsure = self.found.verdict is Class.hang_unknown or self.found.confidence < LOW
        return unsure and any(gap.what == "what would decide" for gap in self.found.missing)


@dataclass(frozen=True)
class Figure:
    """Of one class: ``right`` verdicts of it, ``said`` in all, ``there`` cases of it."""

    name: str
    right: int
    said: int
    there: int


def expectation(path: Path) -> Expectation:
    """Read a ``case.yaml``: flat keys, a list as JSON or as bare words in brackets. Raises ExpectationError."""
    values: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _KEY.match(line)
        if match:
            values[match["key"]] = match["value"] if match["value"].startswith('"') else _COMMENT.sub("", match["value"]).strip()
    try:
        return Expectation(
            Class(_words(values.get("verdict", ""))[0]),
            tuple(Class(word) for word in _words(values.get("acceptable", "[]"))),
            _words(values.get("must_say", "[]")),
            values.get("score", "true").lower() != "false",
        )
    except (ValueError, IndexError) as error:
        raise ExpectationError(f"{path}: verdict and acceptable must be classes: {error}") from error


def _words(text: str) -> tuple[str, ...]:
    if text.startswith("["):
        try:
            return tuple(str(item) for item in json.loads(text))
        except ValueError:
            text = text.strip("[]")
    return tuple(word.strip().strip("\"'") for word in text.split(",") if word.strip())


def run(root: Path) -> list[Row]:
    """Every folder with a ``case.yaml`` under ``root``, in order of name. Raises CaseError or ExpectationError."""
    folders = sorted(path.parent for path in root.glob("*/case.yaml")) if root.is_dir() else []
    if not folders:
        raise casefolder.CaseError(f"{root}: holds no folder with a case.yaml")
    return [judge(folder) for folder in folders]


def judge(folder: Path) -> Row:
    wanted, found = expectation(folder / "case.yaml"), casefolder.judge(folder)
    said = " ".join([*(e.text for e in found.evidence), *(f"{g.what} {g.reason}" for g in found.missing), *found.suspects]).lower()
    return Row(folder.name, wanted, found, tuple(word for word in wanted.must_say if word.lower() not in said))


def figures(rows: Sequence[Row], *, strict: bool) -> list[Figure]:
    """Precision and recall for each class, over the cases that count. ``strict``: against the first verdict only; else
    an acceptable verdict is right for the class that was said."""
    counted = [row for row in rows if row.wanted.score]
    truth = [(row.found.verdict if row._right and not strict else row.wanted.verdict, row.found.verdict) for row in counted]
    found: list[Figure] = []
    for one in Class:
        said = sum(1 for _, verdict in truth if verdict is one)
        there = sum(1 for wanted, _ in truth if wanted is one)
        found.append(Figure(one.value, sum(1 for wanted, verdict in truth if wanted is verdict is one), said, there))
    return found


def table(rows: Sequence[Row]) -> str:
    """One line a case, what was not said, and the sum."""
    lines = [f"{'':4} {'case':<44} {'verdict':<21} {'conf':>4}  expected"]
    for row in rows:
        wanted = " | ".join(c.value for c in (row.wanted.verdict, *row.wanted.acceptable))
        notes = "" if row.wanted.score else "  (cannot be decided: doubt is right)"
        notes += f"  not said: {', '.join(row.unsaid)}" if row.unsaid else ""
        mark = "ok" if row.passed else "FAIL"
        lines.append(f"{mark:<4} {row.case[:44]:<44} {row.found.verdict.value:<21} {row.found.confidence:>4.2f}  {wanted}{notes}")
    passed = sum(row.passed for row in rows)
    first = sum(row.found.verdict is row.wanted.verdict for row in rows)
    lines.append(f"{passed} of {len(rows)} pass; {first} have the first verdict itself")
    return "\n".join(lines)


def scores(rows: Sequence[Row]) -> str:
    """Precision and recall as a table: with what each case calls acceptable, and against its first verdict alone."""
    head = f"{'right':>5} {'said':>4} {'there':>5} {'prec':>5} {'recall':>6}"
    lines = [f"{'':<21} {'with acceptable verdicts':^29}   {'first verdict alone':^29}", f"{'class':<21} {head}   {head}"]
    for lenient, strict in zip(figures(rows, strict=False), figures(rows, strict=True), strict=True):
        if lenient.said or lenient.there or strict.there:
            lines.append(f"{lenient.name:<21} {_figures(lenient)}   {_figures(strict)}")
    return "\n".join(lines)


def _figures(one: Figure) -> str:
    precision = f"{one.right / one.said:.2f}" if one.said else "-"
    recall = f"{one.right / one.there:.2f}" if one.there else "-"
    return f"{one.right:>5} {one.said:>4} {one.there:>5} {precision:>5} {recall:>6}"


def to_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    return [
        {
            "case": row.case,
            "passed": row.passed,
            "verdict": row.found.verdict.value,
            "confidence": round(row.found.confidence, 2),
            "expected": row.wanted.verdict.value,
            "acceptable": [one.value for one in row.wanted.acceptable],
            "unsaid": list(row.unsaid),
            "score": row.wanted.score,
        }
        for row in rows
    ]
