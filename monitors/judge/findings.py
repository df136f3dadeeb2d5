"""What the scene shows, as named findings: each a sentence, where it was read, and which ranks it is about.

Signatures are written in these names. A finding is a fact about the scene, never a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.blackbox import DeviceState
from monitors.judge import answer, collectives, divergence, machine, service, trends, watched, work
from monitors.judge.finding import Finding, Findings, all_of, many
from monitors.judge.ranks import RankView, odd_ones, place, told, views
from monitors.judge.scene import Cite, Scene
from monitors.judge.stands import BUSY, COMPUTING, ELSEWHERE, WAITING, Standing, stand_of

_AS_ORDERED = ("ended", "rank_gone", "member_gone", "health_down")  # a server that was told to stop is gone because of it


def find(scene: Scene) -> Findings:
    """Every finding that the scene bears, by name, in the order in which a report tells them."""
    found: Findings = {}
    ranks = views(scene)
    for part in (
        work.find(scene),
        watched.find(scene),
        _stacks(scene, ranks),
        _boxes(scene, ranks),
        collectives.find(scene, ranks),
        machine.processes(scene, ranks),
        machine.gpus(scene),
        service.log(scene),
        service.ends(scene),
        service.health(scene),
        trends.find(scene),
        answer.find(scene),
    ):
        for name, finding in part:
            found.setdefault(name, finding)
    if "ordered" in found:
        for name in _AS_ORDERED:
            found.pop(name, None)
    return found


def _stacks(scene: Scene, ranks: tuple[RankView, ...]) -> Iterator[tuple[str, Finding]]:
    placed = [rank for rank in ranks if rank.standing is not Standing.unknown and not rank.stopped]
    if not placed:
        return
    first = placed[0]
    if len(placed) > 1:
        yield "groups", Finding(f"stacks by where they stand: {told(placed)}", first.cite)
    steps = tuple(r for r in placed if r.main and "step" in r.main.marks)
    if steps:
        yield "in_step", Finding(f"{steps[0].name()} is inside a step, so it holds work", steps[0].cite)
    yield from _locks(scene, placed)
    callbacks = tuple(r for r in placed if r.standing is Standing.host_callback)
    if callbacks:
        yield "callback", Finding(f"{callbacks[0].name()}: {callbacks[0].text}", callbacks[0].cite, callbacks)
    barrier = [r for r in placed if r.main and r.main.standing is Standing.grammar_barrier]
    if len(barrier) == len(placed):
        assert first.main is not None
        yield (
            "all_at_grammar_barrier",
            Finding(f"{all_of(len(placed), 'rank', 'waits', 'wait')} at the grammar barrier: {first.main.where}", first.main.cite),
        )
    waiting = [r for r in placed if r.standing in WAITING]
    if waiting and len(waiting) == len(placed) and len({place(r) for r in placed}) == 1:
        yield "all_wait_alike", Finding(f"{all_of(len(placed), 'rank', 'stands still', 'stand at one place')}: {first.text}", first.cite)
    odd = odd_ones(placed)
    elsewhere = tuple(r for r in odd if r.standing in ELSEWHERE or r.standing in WAITING)
    # A rank that works while all others wait for work holds them up only if it is the device that it waits for; else it
    # is the scheduler at work, which is told below.
    blocked = {Standing.driver, Standing.read}
    busy = tuple(r for r in odd if r.standing in BUSY and (waiting or r.standing in blocked))
    if waiting and elsewhere:
        who = ", ".join(r.name() for r in elsewhere)
        text = f"{who} stand{'s' if len(elsewhere) == 1 else ''} elsewhere than the others: {elsewhere[0].text}"
        yield "odd_elsewhere", Finding(text, elsewhere[0].cite, elsewhere)
        yield "others_wait", Finding(f"{len(waiting)} of {len(placed)} ranks wait: {waiting[0].text}", waiting[0].cite)
    if busy and len(busy) < len(placed):
        yield "odd_busy", Finding(f"{busy[0].name()} is busy while the others wait: {busy[0].text}", busy[0].cite, busy)
    rest = [r for r in placed if r.standing in ELSEWHERE]
    # Who waits for a worker's reply has given work away: it says nothing of where that work stands.
    if len(rest) == len(placed) and any(r.standing is not Standing.reply for r in rest):
        yield "all_at_rest", Finding(f"{all_of(len(placed), 'rank', 'waits', 'wait')} for work: {first.text}", first.cite)
    working = tuple(r for r in placed if r not in rest)
    transfers = tuple(r for r in placed if r.standing is Standing.transfer)
    if transfers and len(transfers) + len(rest) == len(placed):
        yield (
            "all_at_transfer",
            Finding(f"no rank is in a step, {transfers[0].name()} is {transfers[0].text}", transfers[0].cite, transfers),
        )
    grammar = tuple(r for r in placed if r.standing is Standing.grammar or (r.main and "grammar" in r.main.marks))
    if grammar:
        yield "in_grammar", Finding(f"{grammar[0].name()} is in grammar code: {grammar[0].text}", grammar[0].cite, grammar)
    loads = [r for r in placed if r.main and "load" in r.main.marks]
    if len(loads) == len(placed):
        yield "stacks_load", Finding(f"every stack is inside the loading of the model: {first.text}", first.cite)
    computing = tuple(r for r in placed if r.standing in COMPUTING and r.standing is not Standing.host)
    if computing and not callbacks:
        yield "computing", Finding(f"{computing[0].name()} computes on the host: {computing[0].text}", computing[0].cite, computing)
    if working and not waiting and not busy:
        text = f"{working[0].name()} is on the host and no rank waits on the device: {working[0].text}"
        yield "host_busy", Finding(text, working[0].cite, working)
    for stack in scene.stacks:
        if stack.main and not stack.who.isdigit() and not stack.sample:
            stand = stand_of(stack.main, scene.dialect)
            if stand.standing is Standing.reply:
                yield "engine_waits", Finding(f"process {stack.who} is {stand.standing}: {stand.where}", stand.cite)
    # A rank that waits for work turns in its loop, and its frames with it: that says nothing about progress.
    turned = {r.who: r.still for r in placed if r.still is not None and r.standing not in ELSEWHERE}
    moving = tuple(r for r in placed if turned.get(r.who) is False)
    if moving:
        # Moving frames are progress only where nothing better tells: a loop without end moves too.
        better = scene.stalled_s is not None or bool(scene.boxes)
        text = f"{', '.join(r.name() for r in moving)} stood elsewhere in a later sample"
        yield "frames_move" if better else "stacks_move", Finding(text, moving[0].cite, moving)
    elif turned:
        yield "stacks_still", Finding("the later sample shows the same lines on every rank that is not waiting for work", first.cite)


def _locks(scene: Scene, placed: list[RankView]) -> Iterator[tuple[str, Finding]]:
    """The interpreter's lock is held by a thread inside the driver while a callback waits for it: a circle."""
    for stack in scene.stacks:
        holders = [t for t in stack.threads if t.gil and {"launch_callback", "driver", "device_wait"} & stand_of(t, scene.dialect).marks]
        waiters = [t for t in stack.threads if not t.gil and stand_of(t, scene.dialect).standing is Standing.host_callback]
        if holders and waiters:
            who = tuple(r for r in placed if r.who == stack.who)
            stand = stand_of(holders[0], scene.dialect)
            text = f"the thread that holds the interpreter's lock is inside the driver ({stand.where}) while a host callback waits"
            yield "lock_circle", Finding(text, stand.cite, who)
            return


def _boxes(scene: Scene, ranks: tuple[RankView, ...]) -> Iterator[tuple[str, Finding]]:
    boxes = scene.boxes
    if not boxes:
        return
    by_rank = {view.who: view for view in ranks}

    def finding(difference: divergence.Difference) -> Finding:
        who = difference.ranks[0] if difference.ranks else min(boxes)
        cite = scene.box_cites.get(who, Cite(f"rank-{who}.box"))
        return Finding(difference.text, cite, tuple(by_rank[str(rank)] for rank in difference.ranks))

    for name, difference in (
        ("layout_differs", divergence.layout(boxes)),
        ("accepted_differs", divergence.accepted(boxes)),
        ("sequence_differs", divergence.sequence(boxes)),
        ("payload_differs", divergence.payload(boxes)),
    ):
        if difference is not None:
            yield name, finding(difference)
    verify = divergence.grammar_verify(boxes)
    cite = scene.box_cites.get(min(boxes), Cite(f"rank-{min(boxes)}.box"))
    if verify is not None:
        text = f"step {verify.step} is a verify of {many(len(verify.rows), 'request')} of which at least one is grammar-masked"
        yield "grammar_verify", Finding(text, cite)
    waiting = [box for box in boxes.values() if box.device.state is DeviceState.collective and box.device.enqueued > box.device.completed]
    if len(waiting) == len(boxes) and len({box.device.enqueued for box in waiting}) == 1:
        text = f"every rank has enqueued {waiting[0].device.enqueued} collectives and the last has not completed"
        yield "enqueued_equal", Finding(text, cite)
    if all(box.device.state is DeviceState.idle for box in boxes.values()):
        yield "devices_idle", Finding("no rank's stream has work", cite)
