"""Two faults at once, told apart. Pure.

One verdict names the first class that fits. A server can be wedged *and* have given wrong answers before, and its
clients can have gone elsewhere besides: three questions, with evidence of their own, and so a verdict for each. The
judge is the same; it is asked about that part of the scene that speaks to the question.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from monitors.judge.classify import classify
from monitors.judge.scene import Scene
from monitors.judge.verdict import Class, Verdict

_LEAST = 0.2  # a verdict below it that nothing supports is the judge's way to say that it cannot tell

_SERVES = {
    Class.healthy: "yes", Class.idle_not_hung: "yes, and nothing is asked of it", Class.slow_not_hung: "yes, slowly",
    Class.loading_not_hung: "not yet", Class.parser_leak: "yes", Class.hosted_fallback: "yes",
}  # fmt: skip


class Question(enum.StrEnum):
    serving = "does it serve?"
    answers = "are its answers right?"
    path = "are its clients answered by it?"


@dataclass(frozen=True)
class Fault:
    """The verdict on one question. ``told`` is false where the evidence says nothing of it."""

    question: Question
    verdict: Verdict
    told: bool

    @property
    def answer(self) -> str:
        """To the question, in a word or two."""
        if not self.told:
            return "cannot be told from this evidence"
        if self.question is not Question.serving:
            return "no"
        return _SERVES.get(self.verdict.verdict, "no")

    @property
    def is_alarm(self) -> bool:
        return self.told and self.verdict.verdict.is_alarm

    def to_json(self) -> dict[str, Any]:
        return {"question": self.question.value, "answer": self.answer, "told": self.told, **self.verdict.to_json()}


def faults(scene: Scene) -> tuple[Fault, ...]:
    """First what the server is about, then what else is wrong. An alarm stands before what is none."""
    found = [Fault(Question.serving, verdict := classify(_serving(scene)), _tells(verdict))]
    answers = classify(_answers(scene))
    if answers.verdict in (Class.parser_leak, Class.health_lies):
        found.append(Fault(Question.answers, answers, True))
    path = classify(_path(scene))
    if path.verdict is Class.hosted_fallback:
        found.append(Fault(Question.path, path, True))
    if not found[0].told and len(found) > 1:
        found = found[1:]  # nothing but answers was recorded
    return tuple(sorted(found, key=lambda fault: not fault.is_alarm))


def _tells(verdict: Verdict) -> bool:
    return verdict.confidence >= _LEAST or any(item.supports for item in verdict.evidence)


def _serving(scene: Scene) -> Scene:
    """Without what was in the answers: whether they are right is another question than whether they come."""
    came = tuple(replace(answer, texts=dict.fromkeys(answer.texts, "ok"), model="", fingerprint="") for answer in scene.answers)
    logs = tuple(replace(log, notices=tuple(n for n in log.notices if n.kind not in ("fallback", "leak"))) for log in scene.logs)
    clients = tuple(client for client in scene.clients if client.what != "fallback")
    metrics = {name: value for name, value in scene.metrics.items() if not _leak(name)}
    return replace(scene, answers=came, clients=clients, logs=logs, metrics=metrics, canary=(0, 0), markup="")


def _leak(counter: str) -> bool:
    return "leak" in counter.lower()


def _answers(scene: Scene) -> Scene:
    """What was answered, and what the monitor saw of answers over time."""
    asked = tuple(replace(answer, model="", fingerprint="") for answer in scene.answers)
    leaks = {name: value for name, value in scene.metrics.items() if _leak(name)}
    return Scene(
        scene.dialect, answers=asked, canary=scene.canary, markup=scene.markup, health=scene.health, metrics=leaks, missing=scene.missing
    )


def _path(scene: Scene) -> Scene:
    """Who answered, whatever it said."""
    asked = tuple(replace(answer, texts={}, tokens=None) for answer in scene.answers)
    logs = tuple(
        replace(log, batches=(), tracebacks=(), notices=tuple(n for n in log.notices if n.kind == "fallback")) for log in scene.logs
    )
    return Scene(
        scene.dialect, answers=asked, clients=tuple(c for c in scene.clients if c.what == "fallback"), logs=logs, missing=scene.missing
    )
