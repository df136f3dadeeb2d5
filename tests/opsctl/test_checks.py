"""How a check ends when something else ends it."""

from __future__ import annotations

import threading

from opsctl.rollout.checks import Check, Outcome, passed, run
from opsctl.rollout.watch import Watch
from opsctl.service.wait import Waiter


def test_an_alarm_ends_the_wait_for_an_answer_and_is_the_reason() -> None:
    never = threading.Event()
    watch = Watch((), {}, Waiter(poll_s=0.01), lambda: "the hang monitor says hang_control_plane")

    def ask() -> Check:
        watch.during("an answer", never.wait, 60.0)
        return passed("completion", "")

    try:
        found = run("completion", ask)
    finally:
        never.set()
    assert found.outcome is Outcome.failed and "hang_control_plane" in found.evidence
