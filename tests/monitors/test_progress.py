"""The state machine with an injected clock, and what is declared when."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine import blackbox
from engine.blackbox import BlackBox, Header, Phase
from monitors.judge import incidents
from monitors.judge.incidents import Book, Decision
from monitors.judge.progress import Judgement, Limits, Memory, Sample, State, advance, from_boxes

LIMITS = Limits(stall_s=45)


def drive(samples: list[Sample], memory: Memory | None = None, limits: Limits = LIMITS) -> list[Judgement]:
    now, found = memory or Memory(), []
    for sample in samples:
        now, judgement = advance(now, sample, limits)
        found.append(judgement)
    return found


def work(start: int, count: int, *, held: float = 2, moving: bool = True, every_s: float = 1.0, at: float = 0.0) -> list[Sample]:
    return [
        Sample(at + i * every_s, held, start + i if moving else start, "inv", steps=start + i if moving else start) for i in range(count)
    ]


def test_held_work_that_does_not_move_is_a_stall_after_the_limit_and_not_before() -> None:
    found = drive(work(0, 10) + work(9, 60, moving=False, at=10))
    stalled = [j for j in found if j.state is State.stalled]
    assert stalled and stalled[0].changed and stalled[0].quiet_s >= 45
    assert all(j.state is State.busy for j in found[:54])
    assert any(j.suspicious for j in found) and not any(j.suspicious for j in found[:20])


def test_idle_and_loading_never_stall_however_long() -> None:
    idle = drive([Sample(i, 0, 7, "inv") for i in range(3000)])
    loading = drive([Sample(i, 3, 7, "inv", loading=True) for i in range(3000)])
    assert {j.state for j in idle} == {State.idle} and {j.state for j in loading} == {State.loading}


def test_a_request_that_comes_after_a_long_idle_time_starts_a_clock_of_its_own() -> None:
    found = drive([Sample(i, 0, 7, "inv") for i in range(500)] + work(7, 44, moving=False, at=500))
    assert State.stalled not in {j.state for j in found}


def test_a_gap_in_the_looking_is_not_silence() -> None:
    memory = Memory()
    for sample in work(0, 5):
        memory, _ = advance(memory, sample, LIMITS)
    _, judgement = advance(memory, Sample(9000.0, 2, 4, "inv", steps=4), LIMITS)
    assert judgement.state is State.busy and judgement.quiet_s < 10


def test_a_node_that_does_not_answer_stops_the_clock_and_does_not_reset_it() -> None:
    still = work(4, 31, moving=False)
    unknown = [Sample(31.0 + i, None, None, "inv") for i in range(100)]
    found = drive(still + unknown + work(4, 20, moving=False, at=131))
    assert found[60].state is State.unknown
    assert found[-1].state is State.stalled


def test_a_new_invocation_begins_anew() -> None:
    samples = work(4, 40, moving=False) + [replace(s, invocation="next") for s in work(4, 40, moving=False, at=40)]
    assert State.stalled not in {j.state for j in drive(samples)}


def test_a_stalled_server_that_was_started_again_between_two_looks_has_not_inherited_the_stall() -> None:
    wedged = work(9, 60, moving=False)
    again = [replace(sample, invocation="next") for sample in work(1, 20, at=wedged[-1].mono_s + 0.5)]
    memory, book, decisions = Memory(), Book(), []
    for sample in (*wedged, *again):
        memory, judgement = advance(memory, sample, LIMITS)
        book, decision = incidents.decide(book, judgement, sample, sample.mono_s)
        decisions.append(decision)
    assert [one for one in decisions if one is not Decision.none] == [Decision.declare_wedge, Decision.restarted]


def test_steps_that_end_but_far_slower_than_their_past_are_slow_and_no_stall() -> None:
    fast = work(0, 200, every_s=0.5)
    slow = [Sample(100 + i, 2, 200 + i // 10, "inv", steps=200 + i // 10) for i in range(400)]
    found = drive(fast + slow)
    assert found[-1].state is State.slow and State.stalled not in {j.state for j in found}
    again = drive(fast + slow + work(240, 400, every_s=0.5, at=500))
    assert again[-1].state is State.busy


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 30), st.sampled_from([None, 0.0, 1.0, 5.0]), st.integers(0, 3), st.booleans()), max_size=80))
def test_a_stall_always_means_held_work_and_that_much_watched_silence(steps: list[tuple[float, float | None, int, bool]]) -> None:
    now, memory, silence = 0.0, Memory(), 0.0
    previous: tuple[float | None, int] | None = None
    for gap_s, held, token, loading in steps:
        now += gap_s
        memory, judgement = advance(memory, Sample(now, held, token, "inv", loading=loading), LIMITS)
        if loading or held == 0:
            silence = 0.0
        elif held is not None:
            silence = silence + gap_s if previous and previous[1] == token else 0.0 if previous and previous[1] != token else gap_s
        previous = (held, token)
        if judgement.state is State.stalled:
            assert held and not loading and judgement.quiet_s >= 45


def test_a_box_of_a_long_forward_pass_moves_by_its_layers(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "rank-0.box", Header(1, 0, 1, "d"))
    box.enter(Phase.wait_device)
    box.beat(held=1, step=3)
    box.device_begin(3)
    samples = []
    for layer in range(4):
        box.device_layer(layer)
        samples.append(from_boxes(40.0 * layer, {0: blackbox.read(tmp_path / "rank-0.box")}, ended=False))
    box.close()
    assert {j.state for j in drive(samples)} == {State.busy}


def test_beats_and_refused_requests_are_no_progress(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "rank-0.box", Header(1, 0, 1, "d"))
    box.enter(Phase.recv)
    box.beat(held=1)
    before = from_boxes(0, {0: blackbox.read(tmp_path / "rank-0.box")}, ended=False)
    box.counters["requests_received"] += 4
    box.counters["requests_rejected"] += 4
    box.beat()
    box.publish()
    after = from_boxes(0, {0: blackbox.read(tmp_path / "rank-0.box")}, ended=False)
    box.close()
    assert before.work == after.work and after.held == 1


def test_only_a_leader_knows_what_is_held(tmp_path: Path) -> None:
    boxes = {}
    for rank, held in ((0, 0), (1, 3)):
        box = BlackBox(tmp_path / f"rank-{rank}.box", Header(1, rank, 2, "d", tp=rank))
        box.enter(Phase.recv)
        box.beat(held=held)
        boxes[rank] = blackbox.read(tmp_path / f"rank-{rank}.box")
        box.close()
    assert from_boxes(0, boxes, ended=False).held == 0
    assert from_boxes(0, {1: boxes[1]}, ended=False).loading, "a rank is not there yet"
    assert not from_boxes(0, {1: boxes[1]}, ended=False, all_answered=False).loading, "its node did not answer: nobody knows"


def _judged(state: State, changed: bool = True) -> Judgement:
    return Judgement(state, 0, 50 if state is State.stalled else 0, 1, changed)


def test_one_wedge_is_one_incident_and_its_death_belongs_to_it() -> None:
    wedged = Sample(0, 1, 9, "inv", steps=9)
    book, decision = incidents.decide(Book(), _judged(State.stalled), wedged, 1000)
    assert decision is Decision.declare_wedge
    book = Book.from_json(book.to_json())  # as a monitor that was started again reads it
    book, decision = incidents.decide(book, _judged(State.busy), wedged, 1001)
    assert decision is Decision.none, "not yet watched long enough is no recovery"
    book, decision = incidents.decide(book, _judged(State.stalled), wedged, 1050)
    assert decision is Decision.none
    book, decision = incidents.decide(book, _judged(State.ended), replace(wedged, ended=True), 1300)
    assert decision is Decision.ended and not book.ends
    book, decision = incidents.decide(book, _judged(State.idle), Sample(0, 0, 0, "next", steps=0), 1400)
    assert decision is Decision.restarted and book.open is None


def test_a_recovery_is_a_later_step_and_closes_the_incident() -> None:
    book, _ = incidents.decide(Book(), _judged(State.stalled), Sample(0, 1, 9, "inv", steps=9), 0)
    book, decision = incidents.decide(book, _judged(State.busy), Sample(0, 1, 10, "inv", steps=10), 5)
    assert decision is Decision.recovered and book.open is None


def test_crashes_in_a_row_are_counted_and_paged_once_for_each_class() -> None:
    book = Book()
    for number, invocation in enumerate(("a", "b", "c"), 1):
        book, decision = incidents.decide(book, _judged(State.ended), Sample(0, None, 0, invocation, ended=True), 100.0 * number)
        assert decision is Decision.declare_crash and len(book.ends) == number
    assert incidents.page_due(book, "crash:crash_loop", 300)
    book = incidents.with_page(book, "crash:crash_loop", "small: crash_loop", 300)
    assert not incidents.page_due(book, "crash:crash_loop", 400) and incidents.page_due(book, "crash:crash", 400)
    late, _ = incidents.decide(book, _judged(State.ended), Sample(0, None, 0, "d", ended=True), 5000)
    assert len(late.ends) == 1, "what is long past is no loop"


def test_only_ends_of_one_cause_are_a_row_and_a_watchdogs_kill_of_a_named_wedge_is_no_end_of_its_own() -> None:
    book, row = Book(), []
    for at, cause in enumerate(("watchdog", "TypeError: x", "exit: 1", "TypeError: x", ""), 1):
        book, decision = incidents.decide(book, _judged(State.ended), Sample(0, None, 0, str(at), ended=True), 100.0 * at, cause)
        assert decision is Decision.declare_crash
        row.append(book.row)
    assert row == [1, 1, 1, 2, 2], "what died without a word may have died as the one with an exit status"
    assert Book.from_json(json.loads(json.dumps(book.to_json()))) == book
    wedged, _ = incidents.decide(Book(), _judged(State.stalled), Sample(0, 1, 9, "inv", steps=9), 0)
    moved, decision = incidents.decide(wedged, _judged(State.busy), Sample(0, 1, 10, "inv", steps=10), 5)
    assert decision is Decision.recovered
    killed, decision = incidents.decide(moved, _judged(State.ended), Sample(0, None, 10, "inv", ended=True), 6, "watchdog")
    assert decision is Decision.ended and killed.row == 0


def test_where_starts_have_no_names_a_server_that_serves_again_is_another_and_may_crash_again() -> None:
    died, _ = incidents.decide(Book(), _judged(State.ended), Sample(0, None, 0, ended=True), 0)
    back, decision = incidents.decide(died, _judged(State.idle), Sample(0, 0, 0), 60)
    assert decision is Decision.restarted and back.open is None
    _, decision = incidents.decide(back, _judged(State.ended), Sample(0, None, 0, ended=True), 90)
    assert decision is Decision.declare_crash


def test_a_clock_that_was_set_back_makes_no_loop_and_swallows_no_page() -> None:
    book, _ = incidents.decide(Book(), _judged(State.ended), Sample(0, None, 0, "a", ended=True), 90_000)
    book = incidents.with_page(book, "crash:crash", "small: crash", 90_000)
    back, decision = incidents.decide(book, _judged(State.ended), Sample(0, None, 0, "b", ended=True), 3_000)
    assert decision is Decision.declare_crash and back.ends == (3_000,), "an end of tomorrow is none of the last quarter of an hour"
    assert incidents.page_due(back, "crash:crash", 3_000), "else nobody is paged until tomorrow"
    assert not incidents.page_due(back, "crash:crash", 89_990), "a clock that was only put right"


def test_what_somebody_was_woken_for_outlives_a_restart_of_the_monitor() -> None:
    book = incidents.with_page(Book(), "wedge:inv:9", "small: hang_tp_desync", 5)
    assert Book.from_json(json.loads(json.dumps(book.to_json()))).told == "small: hang_tp_desync"
    older = {key: value for key, value in book.to_json().items() if key != "told"}
    assert Book.from_json(older).told == "", "a book that an older monitor wrote is read"


def test_an_incident_that_was_not_captured_and_paged_to_the_end_is_taken_up_again() -> None:
    def alarming(verdict: str) -> bool:
        return verdict.startswith("hang")

    declared, _ = incidents.decide(Book(), _judged(State.stalled), Sample(0, 1, 9, "inv", steps=9), 0)
    assert declared.open is not None
    assert incidents.resumed(declared, alarming).open is None, "killed before the bundle was whole"
    captured = replace(declared, open=replace(declared.open, bundle="/b", verdict="hang_tp_desync"))
    assert incidents.resumed(captured, alarming).open is None, "killed before the page went out"
    paged = incidents.with_page(captured, declared.open.key, "small: hang_tp_desync", 1)
    assert incidents.resumed(paged, alarming) == paged
    quiet = replace(declared, open=replace(declared.open, bundle="/b", verdict="slow_not_hung"))
    assert incidents.resumed(quiet, alarming) == quiet, "no page was due"
    crashed, _ = incidents.decide(Book(), _judged(State.ended), Sample(0, None, 0, "inv", ended=True), 0)
    again, decision = incidents.decide(incidents.resumed(crashed, alarming), _judged(State.ended), Sample(0, None, 0, "inv", ended=True), 5)
    assert decision is Decision.declare_crash and len(again.ends) == 1, "one end is not counted twice"


def test_a_server_that_warms_up_is_loading_whatever_its_boxes_hold(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "rank-0.box", Header(1, 0, 1, "d"))
    box.enter(Phase.launch)
    box.beat(held=1)
    boxes = {0: blackbox.read(tmp_path / "rank-0.box")}
    box.close()
    assert from_boxes(0, boxes, ended=False, ready=False).loading
    assert not from_boxes(0, boxes, ended=False).loading


def test_a_grammar_that_compiles_for_long_is_no_stall_while_the_leader_beats_and_is_one_when_it_does_not(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "rank-0.box", Header(1, 0, 1, "d"))
    box.counters["grammar_waiting"] = 1
    box.publish()
    box.beat(held=1)

    def look(at: float) -> Sample:
        return from_boxes(at, {0: blackbox.read(tmp_path / "rank-0.box")}, ended=False)

    samples = []
    for second in range(120):
        box.enter(Phase.idle)
        samples.append(look(second))
    assert {j.state for j in drive(samples, limits=Limits())} == {State.busy}
    frozen = [look(120.0 + second) for second in range(10)]
    assert drive(samples + frozen, limits=Limits())[-1].state is State.stalled
    box.beat(held=2)  # another request, which waits for nothing but a batch
    waiting = []
    for second in range(10):
        box.enter(Phase.idle)
        waiting.append(look(200.0 + second))
    box.close()
    assert drive(samples + waiting, limits=Limits())[-1].state is State.stalled
