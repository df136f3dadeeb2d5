"""The request of every kind of client, before and after a change: who gets another class of answer?

A class that differs is asked for twice more, since clients sample: three that differ fail, some that do not are
inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monitors.fleet import Caller
from opsctl.callers.agreed import Agreed
from opsctl.callers.answer import Answered, classify, remedy
from opsctl.callers.foresee import Foreseen
from opsctl.callers.request import with_nonce
from opsctl.rollout.checks import Outcome
from opsctl.rollout.reply import Reply

AGAIN = 2
Ask = Callable[[Mapping[str, Any]], Reply]


@dataclass(frozen=True)
class Row:
    """One caller's answer to the question. ``must`` is what its client has to do, empty when it need do nothing."""

    caller: str
    outcome: Outcome
    before: str
    after: str
    text: str
    must: str = ""


def sent(caller: Caller) -> bool:
    """Whether a rollout sends this caller's request at all."""
    return caller.probe != "never-live"


def ask_all(callers: Sequence[Caller], ask: Ask, nonce: Callable[[], str]) -> dict[str, Answered]:
    """The class of each caller that may be asked beside live traffic."""
    return {one.name: ask_one(one, ask, nonce) for one in callers if sent(one)}


def ask_one(caller: Caller, ask: Ask, nonce: Callable[[], str]) -> Answered:
    request = with_nonce(caller.request, nonce())
    return classify(ask(request), request, caller.expect)


def compare(
    callers: Sequence[Caller], ask: Ask, nonce: Callable[[], str], *,
    before: Mapping[str, str], agreed: Mapping[str, Agreed], foreseen: Mapping[str, Foreseen],
) -> list[Row]:  # fmt: skip
    """Ask each caller's request and hold the answer against what it got ``before`` and what is expected of it."""
    rows = []
    for caller in callers:
        was, change = before.get(caller.name, ""), agreed.get(caller.name)
        if not sent(caller):
            rows.append(_unsent(caller, was, change, foreseen.get(caller.name)))
            continue
        first = ask_one(caller, ask, nonce)
        row = judge(caller, first, was, change)
        if row.outcome is Outcome.failed:
            more = [ask_one(caller, ask, nonce) for _ in range(AGAIN)]
            if any(judge(caller, one, was, change).outcome is Outcome.passed for one in more):
                seen = ", ".join(one.kind for one in (first, *more))
                row = Row(caller.name, Outcome.inconclusive, was, first.kind, f"{caller.name}: its answers vary: {seen}")
        rows.append(row)
    return rows


def judge(caller: Caller, after: Answered, before: str, change: Agreed | None, *, how: str = "") -> Row:
    """One answer against what was. ``how``: said in place of having been asked."""
    name, got = caller.name, after.kind + (f" ({after.why})" if after.why else "")
    if after.kind == before:
        note = (
            ""
            if after.kind == caller.expect or (change and after.kind == change.to)
            else f", though the fleet file expects {caller.expect}"
        )
        return Row(name, Outcome.passed, before, after.kind, f"{name}: {after.kind}, as before{note}{how}")
    came_from = f", {before} before" if before else ""
    if change is not None and after.kind == change.to:
        must = remedy(before or caller.expect, after.kind, caller.remedy)
        text = f"{name}: {after.kind}{came_from}, as agreed; its client must {must}; review by {change.review_by}{how}"
        return Row(name, Outcome.passed, before, after.kind, text, must)
    if after.kind == caller.expect:
        return Row(name, Outcome.passed, before, after.kind, f"{name}: {after.kind}{came_from}, as expected{how}")
    must = remedy(before or caller.expect, after.kind, caller.remedy)
    return Row(
        name, Outcome.failed, before, after.kind, f"{name}: {got} where it got {before or caller.expect}{how}; its client must {must}", must
    )


def _unsent(caller: Caller, before: str, change: Agreed | None, foreseen: Foreseen | None) -> Row:
    """A shape that is dangerous beside traffic: what the change makes of it is told by flags, or it is not known."""
    if foreseen is None or (foreseen.same and not foreseen.after):
        why = foreseen.why if foreseen else "nothing in this change decides it"
        text = f"{caller.name}: not sent (never-live) and never recorded; {why}"
        return Row(caller.name, Outcome.passed, before, before, text)
    if foreseen.after:
        how = f"; not sent (never-live), foreseen: {foreseen.why}"
        return judge(caller, Answered(foreseen.after), before or foreseen.before, change, how=how)
    if change is not None and change.to != before:  # an agreement to what it gets already is about another change
        text = (
            f"{caller.name}: not sent (never-live); {change.to}, as agreed and not proven ({foreseen.why}): see it when nobody is served: "
            f"opsctl callers record --never-live; review by {change.review_by}"
        )
        return Row(caller.name, Outcome.passed, before, change.to, text)
    text = (
        f"{caller.name}: not sent (never-live), and what it gets now cannot be known: {foreseen.why}; record it when nobody is served: "
        "opsctl callers record --never-live"
    )
    return Row(caller.name, Outcome.inconclusive, before, "", text)
