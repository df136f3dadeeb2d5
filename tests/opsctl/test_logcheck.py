"""What a log proves when the journal suppressed some of it."""

from __future__ import annotations

from opsctl.rollout.checks import Check, Outcome, failed, inconclusive, passed, proven
from opsctl.rollout.logcheck import clean, gap
from opsctl.service.manager import Line

WHOLE = (Line("Server started", 7), Line("req rid=1 status=200", 7))
SUPPRESSED = Line("Suppressed 12 messages from lb.service", manager=True, lost=True)
TRACE = tuple(Line(text, 7) for text in ("Traceback (most recent call last):", '  File "a.py", line 1', "TypeError: no"))


def outcome(*lines: Line, known: frozenset[str] = frozenset()) -> Outcome:
    return clean({"n1": WHOLE, "n2": lines}, known).outcome


def test_a_log_of_which_lines_are_lost_proves_nothing_and_says_whose() -> None:
    found = clean({"n1": WHOLE, "n2": (*WHOLE, SUPPRESSED)}, frozenset())
    assert found.outcome is Outcome.inconclusive and "n2: Suppressed 12 messages" in found.evidence
    assert outcome(*WHOLE) is Outcome.passed


def test_a_new_traceback_fails_whatever_else_is_lost_and_a_known_one_does_not_hide_the_gap() -> None:
    assert outcome(SUPPRESSED, *TRACE) is Outcome.failed
    assert outcome(SUPPRESSED, *TRACE, known=frozenset({"TypeError"})) is Outcome.inconclusive
    assert outcome(*TRACE, known=frozenset({"TypeError"})) is Outcome.passed


def test_a_gap_is_enough_for_what_was_verified_before_and_nothing_else_that_cannot_be_told_is() -> None:
    good, hole = passed("ranks", ""), clean({"n1": (SUPPRESSED,)}, frozenset())

    def shows(*checks: Check) -> bool:
        return proven(checks)

    assert shows(good, hole) and shows(good)
    assert not shows() and not shows(good, inconclusive("ranks", "")) and not shows(hole, failed("ranks", ""))
    assert gap({"n1": WHOLE}) == ""
