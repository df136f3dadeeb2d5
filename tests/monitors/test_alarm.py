"""Which verdicts page, and when."""

from __future__ import annotations

import pytest

from monitors.judge.alarm import Due, acts, due
from monitors.judge.patience import Limits, Signs, Source
from monitors.judge.verdict import Class, Verdict

LIMITS = Limits()


def asked(kind: Class, confidence: float = 0.8, *, lies: bool = True, quiet_s: float = 12, source: Source = Source.steps,
          signs: Signs | None = None) -> Due:  # fmt: skip
    return due(Verdict(kind, confidence, (), ()), lies=lies, quiet_s=quiet_s, source=source, limits=LIMITS, signs=signs or Signs())


@pytest.mark.parametrize("kind", [Class.slow_not_hung, Class.loading_not_hung, Class.idle_not_hung, Class.healthy])
def test_what_is_no_alarm_never_pages(kind: Class) -> None:
    assert asked(kind, quiet_s=9999) is Due.never


@pytest.mark.parametrize("kind", [Class.crash, Class.crash_loop, Class.oom, Class.health_lies, Class.parser_leak])
def test_crash_and_corruption_page_at_once(kind: Class) -> None:
    assert asked(kind, lies=False, quiet_s=0) is Due.now


def test_a_silence_that_ended_while_its_evidence_was_taken_is_a_record() -> None:
    assert asked(Class.hang_tp_desync, lies=False) is Due.never


@pytest.mark.parametrize("kind", [Class.hang_stopped, Class.hang_tp_desync, Class.hang_grammar_barrier, Class.hang_host_callback])
def test_ranks_that_wait_for_each_other_page_at_once(kind: Class) -> None:
    assert asked(kind) is Due.now


def test_what_a_long_compilation_looks_like_waits_for_the_ceiling() -> None:
    assert asked(Class.hang_cpu_bound) is Due.later and asked(Class.hang_cpu_bound, quiet_s=LIMITS.ceiling_s) is Due.now
    assert asked(Class.hang_cpu_bound, source=Source.boxes) is Due.later
    assert asked(Class.hang_cpu_bound, source=Source.boxes, quiet_s=30) is Due.now


def test_waiting_on_the_device_pages_at_once_only_where_a_box_or_power_tells_a_spin() -> None:
    assert asked(Class.hang_symmetric_spin) is Due.later
    assert asked(Class.hang_symmetric_spin, signs=Signs(spinning=True)) is Due.now
    assert asked(Class.hang_symmetric_spin, source=Source.boxes) is Due.now


def test_a_rank_busy_on_the_host_may_compile_unless_a_black_box_tells() -> None:
    assert asked(Class.hang_asymmetric, signs=Signs(spinning=True)) is Due.later
    assert asked(Class.hang_asymmetric, source=Source.boxes) is Due.now


def test_work_without_progress_on_gpus_that_work_is_given_long_and_not_for_ever() -> None:
    working = Signs(working=True)
    assert asked(Class.hang_unknown, quiet_s=950, signs=working) is Due.later
    assert asked(Class.hang_unknown, quiet_s=1300, signs=working) is Due.now


def test_idle_gpus_alone_may_be_a_compilation_and_a_scheduler_seen_at_rest_is_none() -> None:
    def ask(blind: bool, quiet_s: float, source: Source = Source.lines) -> Due:
        verdict = Verdict(Class.hang_control_plane, 0.6, (), (), blind=blind)
        return due(verdict, lies=True, quiet_s=quiet_s, source=source, limits=LIMITS)

    assert ask(True, 60) is Due.later and ask(True, LIMITS.ceiling_s) is Due.now and ask(False, 60) is Due.now
    assert ask(True, 10, Source.boxes) is Due.now, "a black box has told that nothing computes"


def test_little_evidence_waits() -> None:
    assert asked(Class.hang_tp_desync, 0.3) is Due.later


def test_what_pages_nobody_is_not_acted_on_and_neither_is_a_crash_or_what_is_over() -> None:
    hang, crash = Verdict(Class.hang_stopped, 0.9), Verdict(Class.crash, 0.9)
    assert acts(hang, Due.now, still_open=True)
    assert not acts(hang, Due.later, still_open=True), "it may be a compilation, and a restart would end it"
    assert not acts(hang, Due.never, still_open=True)
    assert not acts(crash, Due.now, still_open=True), "the service manager starts it"
    assert not acts(hang, Due.now, still_open=False), "its server has ended since"
