"""What the daemon decides, turn by turn, in simulated time: the same pure functions, without its files and processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from monitors.judge import alarm, incidents
from monitors.judge.alarm import Due
from monitors.judge.classify import classify
from monitors.judge.incidents import Book, Decision
from monitors.judge.progress import Limits, Memory, Sample, State, advance
from monitors.judge.scene import Scene
from monitors.judge.verdict import Class, Verdict

CAPTURE_S = 6.0  # two samples of stacks 3 s apart, and what is around them


@dataclass(frozen=True)
class Page:
    at_s: float
    verdict: Class
    quiet_s: float
    truth: str


@dataclass
class Desk:
    """``scene`` makes the evidence that a capture would have found, from what is really going on."""

    limits: Limits
    scene: Callable[[Sample, str, float], Scene]
    memory: Memory = field(default_factory=Memory)
    book: Book = field(default_factory=Book)
    capturing: tuple[float, str] | None = None  # when it is done, and what was going on when it began
    waiting: tuple[Verdict, str] | None = None
    declared: list[tuple[float, float, str]] = field(default_factory=list)  # when, after how long, truth
    records: list[tuple[Class, str]] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    captures: int = 0

    def turn(self, sample: Sample, truth: str) -> State:
        self.memory, judgement = advance(self.memory, sample, self.limits)
        self.book, decision = incidents.decide(self.book, judgement, sample, sample.mono_s)
        if decision is Decision.declare_wedge:
            self.declared.append((sample.mono_s, judgement.quiet_s, truth))
            if self.capturing is None:
                self.capturing = (sample.mono_s + CAPTURE_S, truth)
        if self.capturing and sample.mono_s >= self.capturing[0]:
            began, self.capturing = self.capturing[1], None
            self.captures += 1
            verdict = classify(self.scene(sample, began, judgement.quiet_s or judgement.stall_s))
            if self.book.open is not None:
                self.book = replace(self.book, open=replace(self.book.open, bundle=str(self.captures), verdict=verdict.verdict.value))
            self.waiting = (verdict, began)
        if self.waiting:
            verdict, began = self.waiting
            opened = self.book.open
            lies = opened is not None and opened.bundle == str(self.captures)
            found = alarm.due(verdict, lies=lies, quiet_s=judgement.quiet_s, source=sample.source, limits=self.limits, signs=sample.signs)
            if found is not Due.later:
                self.waiting = None
            if found is Due.now:
                self.pages.append(Page(sample.mono_s, verdict.verdict, judgement.quiet_s, began))
            elif found is Due.never:
                self.records.append((verdict.verdict, began))
        return judgement.state
