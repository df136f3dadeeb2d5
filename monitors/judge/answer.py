"""Findings about answers: markup that leaked, text that is no answer, a server that is not the one asked."""

from __future__ import annotations

import re
from collections.abc import Iterator

from monitors.judge import leak
from monitors.judge.finding import Finding
from monitors.judge.scene import Answer, Cite, Scene

_CHANNELS = ("content", "arguments", "reasoning")
# Engines that people run themselves leave the fingerprint empty or write their own; this form is a hosted service's.
_HOSTED = re.compile(r"^fp_[0-9a-f]{8,}$")


def find(scene: Scene) -> Iterator[tuple[str, Finding]]:
    for answer in scene.answers:
        yield from _leaks(answer)
        yield from _worthless(answer)
        if _HOSTED.match(answer.fingerprint):
            text = f"the answer's system_fingerprint {answer.fingerprint} has the form of a hosted service"
            yield "answered_elsewhere", Finding(text, answer.cite)
    models = {answer.model: answer for answer in scene.answers if answer.model}
    if len(models) > 1:
        last = list(models.values())[-1]
        yield "answered_elsewhere", Finding(f"answers name different models: {', '.join(sorted(models))}", last.cite)


def _leaks(answer: Answer) -> Iterator[tuple[str, Finding]]:
    for channel in _CHANNELS:
        text = answer.texts.get(channel, "")
        found = leak.scan(text, channel)
        if found is None:
            continue
        cite = Cite(answer.cite.artefact, answer.lines.get(channel, 0))
        calls = "no tool_calls" if not answer.tool_calls else f"{answer.tool_calls} parts of tool calls"
        end = f", finish_reason {answer.finish}" if answer.finish else ""
        yield "leak", Finding(f"{found.what} in the visible {channel}: {found.marker!r} ({found.count} markers; {calls}{end})", cite)
        break
    else:
        if answer.ended and any(text.strip() for text in answer.texts.values()):
            yield "answered", Finding("a request was answered to its end and nothing in the answer is amiss", answer.cite)
    if leak.doubled(answer.texts.get("content", "")):
        yield "doubled", Finding("the answer's text is one piece given twice", answer.cite)


def _worthless(answer: Answer) -> Iterator[tuple[str, Finding]]:
    content = answer.texts.get("content", "")
    piece = leak.degenerate(content)
    if piece:
        yield "answer_wrong", Finding(f"the answer ends in {piece!r} again and again", answer.cite)
    elif answer.ended and answer.tokens and not content.strip() and not answer.tool_calls and not answer.texts.get("reasoning"):
        yield "answer_wrong", Finding(f"{answer.tokens} tokens were generated and none of them is in the answer", answer.cite)
