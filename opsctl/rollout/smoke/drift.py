"""Greedy answers to fixed prompts, before a change and after it: is the model still the same model?

This is what finds fluent garbage. In float32 the same prompt gives the same text whatever shares its batch, so all of
it must stay; elsewhere a rounding may turn a token and everything behind it, so a share of each answer's beginning
must stay, over all prompts together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opsctl.callers.matrix import Ask
from opsctl.rollout.checks import Check, failed, inconclusive, passed
from opsctl.rollout.probe import ApiError

SHARE = 0.5  # of the beginning of an answer, where nothing is declared and arithmetic is not float32
_PROMPTS = {
    "count": "Count from one to ten in English words: one, two, three,",
    "alphabet": "Continue the alphabet: a, b, c, d, e,",
    "days": "Name the days of the week in order, beginning with Monday.",
    "sum": "What is 12 plus 30? Answer with the number and one short sentence.",
}


def answers(ask: Ask) -> dict[str, str]:
    """What the server says to each fixed prompt. Raises ApiError when it does not answer one."""
    found = {}
    for name, prompt in _PROMPTS.items():
        reply = ask(_request(prompt))
        if reply.status != 200 or reply.why:
            raise ApiError(f"a greedy answer ({name}): {f'HTTP {reply.status}: ' if reply.status not in (0, 200) else ''}{reply.why}")
        found[name] = reply.text
    return found


def _request(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 24}


def compare(before: Mapping[str, str], after: Mapping[str, str], share: float) -> Check:
    """``share``: how much of the beginning must be the same, over all prompts; 1 asks for equal texts. Never shows text."""
    kept = {name: _kept(text, after[name]) for name, text in before.items() if name in after}
    if not kept:
        return inconclusive("drift", "no greedy answers from before the change to compare with")
    mean = sum(kept.values()) / len(kept)
    data = {"kept": {name: round(value, 3) for name, value in kept.items()}, "tolerance": share}
    told = ", ".join(f"{name} {value:.0%}" for name, value in kept.items())
    if mean < share:
        text = f"greedy answers are not those of before: {mean:.0%} of their beginning is the same ({told}), {share:.0%} must be"
        return failed("drift", text, **data)
    return passed("drift", f"{mean:.0%} of {len(kept)} greedy answers is as before, {share:.0%} must be", **data)


def _kept(before: str, after: str) -> float:
    if before == after:
        return 1.0
    # An equal text that one of them goes on from is not all the same.
    same = next((at for at, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), min(len(before), len(after)))
    return min(same / max(len(before), len(after)), 0.999)


def tolerance(declared: float | None, *, exact: bool) -> float:
    """``exact``: both sides compute in float32."""
    if declared is not None:
        return declared
    return 1.0 if exact else SHARE
