"""How long a silence may last: by source, by the server's past, by signs, under the ceiling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monitors import engines
from monitors.judge.patience import Limits, Signs, Source, bound_s, bounds, patience_s
from monitors.judge.progress import Judgement, Memory, Sample, State, advance

LIMITS = Limits()


def drive(samples: list[Sample], limits: Limits = LIMITS) -> list[Judgement]:
    memory, found = Memory(), []
    for sample in samples:
        memory, judgement = advance(memory, sample, limits)
        found.append(judgement)
    return found


def boxes(at: float, work: int, held: float = 1, **more: bool) -> Sample:
    return Sample(at, held, work, "inv", steps=work, source=Source.boxes, exact=True, signs=Signs(**more))


def declared(samples: list[Sample], limits: Limits = LIMITS) -> float | None:
    found = drive(samples, limits)
    return next((sample.mono_s for sample, judgement in zip(samples, found, strict=True) if judgement.state is State.stalled), None)


@pytest.mark.parametrize(("source", "most_s"), [(Source.boxes, 5.0), (Source.steps, 15.0), (Source.lines, 48.0)])
def test_a_wedge_is_declared_within_the_bound_that_is_printed(source: Source, most_s: float) -> None:
    every = {Source.boxes: 0.5, Source.steps: 0.5, Source.lines: 1.0}[source]
    interval = 10 if source is Source.lines else 1
    work = [replace(boxes(i * every, int(i * every) // interval), source=source) for i in range(400)]
    last = work[-1].mono_s
    still = [replace(work[-1], mono_s=last + every * i) for i in range(1, 400)]
    when = declared(work + still)
    assert when is not None and when - last <= bound_s(LIMITS, source) <= most_s


def test_signs_of_standing_shorten_and_signs_of_work_lengthen_up_to_the_ceiling() -> None:
    plain = patience_s(LIMITS, Source.lines)
    assert patience_s(LIMITS, Source.lines, Signs(spinning=True)) < plain
    assert patience_s(LIMITS, Source.lines, Signs(working=True)) == LIMITS.ceiling_s == 150
    assert patience_s(LIMITS, Source.steps, Signs(computing=True)) == LIMITS.ceiling_s
    assert patience_s(LIMITS, Source.boxes, Signs(working=True)) == patience_s(LIMITS, Source.boxes), "a box tells of each layer"


def test_gauges_that_lag_are_waited_for_unless_a_gpu_spins() -> None:
    assert patience_s(LIMITS, Source.steps, lag_s=35) > 35
    assert patience_s(LIMITS, Source.steps, Signs(spinning=True), lag_s=35) <= 10


def test_a_server_whose_silences_end_by_themselves_is_given_longer_and_never_more_than_the_ceiling() -> None:
    samples, at = [], 0.0
    for silence in (20.0, 25.0, 60.0, 80.0):
        for work in range(3):
            samples += [replace(boxes(at + i, len(samples) + work), source=Source.steps) for i in range(3)]
            at += 3
        samples += [replace(samples[-1], mono_s=at + i) for i in range(int(silence))]
        at += silence
    found = drive(samples)
    assert found[-1].stall_s > 80
    assert max(judgement.stall_s for judgement in found) <= LIMITS.ceiling_s
    assert patience_s(LIMITS, Source.steps, silences=[900.0]) == LIMITS.ceiling_s


def test_slow_steps_raise_the_patience_of_a_server_known_by_lines() -> None:
    lines = [Sample(float(i), 3, i // 25, "inv") for i in range(400)]  # a line every 25 s: 40 steps of 0.6 s
    assert declared(lines) is None
    assert drive(lines)[-1].stall_s == pytest.approx(75, abs=8)


def test_one_sign_of_life_does_not_end_a_stall_and_two_do() -> None:
    stuck = [boxes(0.5 * i, 5) for i in range(20)]
    once = [boxes(10 + 0.5 * i, 6) for i in range(4)]
    found = drive(stuck + once)
    assert found[-1].state is State.stalled and sum(judgement.changed for judgement in found if judgement.state is State.stalled) == 1
    assert drive([*stuck, *once, boxes(13, 7)])[-1].state is State.busy


def test_work_that_was_given_up_and_asked_for_again_counts_on_where_held_is_exact() -> None:
    samples, at = [boxes(0, 1), boxes(0.5, 2)], 1.0
    for _ in range(4):
        samples += [boxes(at + 0.5 * i, 2) for i in range(4)] + [boxes(at + 2 + 0.5 * i, 2, held=0) for i in range(10)]
        at += 7
    assert declared(samples) is not None
    assert declared([replace(sample, exact=False, source=Source.steps) for sample in samples]) is None


def test_signs_that_come_and_go_neither_open_nor_close_a_stall_twice() -> None:
    stuck = [replace(boxes(0.5 * i, 5), source=Source.lines, signs=Signs(spinning=i % 2 == 0)) for i in range(200)]
    found = drive(stuck)
    assert sum(judgement.changed for judgement in found if judgement.state is State.stalled) == 1 and found[-1].state is State.stalled


def test_a_watchdog_that_is_short_leaves_half_of_its_time_for_the_evidence() -> None:
    assert patience_s(Limits(watchdog_s=30), Source.lines) == 15
    assert patience_s(Limits(stall_s=77), Source.lines) == 77


def test_the_bounds_that_doctor_prints_are_those_of_the_engines_own_sources() -> None:
    assert bounds(engines.load("lastbatch"), LIMITS) == {Source.boxes: 4.5}
    vllm = bounds(engines.load("vllm"), LIMITS)
    assert vllm[Source.steps] <= 15 < vllm[Source.lines]
    slow = bounds(engines.load("sglang"), LIMITS, interval_s=30)
    assert slow[Source.steps] < slow[Source.lines] == pytest.approx(138)
