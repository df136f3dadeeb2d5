"""Compare what ranks say of their collectives outside the black boxes: recorders, RAS, a watchdog's lines.

Ranks enqueue ahead of each other, so another *last* number is no difference by itself. What counts is the collective
in which a rank stands: another operation or size under one number, or a rank that has not come to the number at which
the others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from monitors.judge.finding import Finding
from monitors.judge.ranks import RankView
from monitors.judge.scene import Enqueued, Missing, Notice, Scene

People = Callable[[Sequence[int]], tuple[RankView, ...]]


def find(scene: Scene, views: tuple[RankView, ...]) -> Iterator[tuple[str, Finding]]:
    by_rank = {view.who: view for view in views}

    def people(ranks: Sequence[int]) -> tuple[RankView, ...]:
        return tuple(by_rank.get(str(rank)) or RankView.named(rank) for rank in ranks if rank >= 0)

    yield from _timeouts(scene.notices("collective_timeout"), people)
    for notice in scene.notices("desync"):
        rank = notice.fields.get("rank", "")
        who = people([int(rank)]) if rank.isdigit() else ()
        yield "desync_report", Finding(f"PyTorch's own report of a desync: {notice.text[:200]}", notice.cite, who)
        break
    groups: dict[tuple[str, str], list[Enqueued]] = {}
    for one in (*scene.enqueued, *_from_notices(scene)):
        groups.setdefault((one.source, one.group), []).append(one)
    for (source, _), found in groups.items():
        latest = {one.rank: one for one in found}
        if len(latest) > 1:
            yield from _compare(source, list(latest.values()), people)


def _from_notices(scene: Scene) -> Iterator[Enqueued]:
    for notice in scene.notices("recorder"):
        yield Enqueued(int(notice.fields["rank"]), int(notice.fields["seq"]), notice.fields["op"], "", notice.fields["state"], None, "",
                       "recorder", notice.cite)  # fmt: skip


def _timeouts(timeouts: Sequence[Notice], people: People) -> Iterator[tuple[str, Finding]]:
    """Collectives that timed out, by rank: the same one everywhere, or not."""
    if not timeouts:
        return
    last = {notice.fields["rank"]: notice for notice in timeouts}
    entered = {rank: (n.fields["seq"], n.fields["op"], n.fields["numel"]) for rank, n in last.items()}
    sides = "; ".join(f"rank {rank} {op} {seq} with {numel} elements" for rank, (seq, op, numel) in list(entered.items())[:4])
    if len(last) == 1:
        yield "timeout_of_one", Finding(f"a collective timed out on one rank of which the log tells: {sides}", timeouts[0].cite)
    elif len(set(entered.values())) > 1:
        odd = _minority({int(rank): value for rank, value in entered.items()})
        yield "timeouts_differ", Finding(f"collectives timed out: {sides}", timeouts[0].cite, people(odd))
    else:
        yield "timeouts_equal", Finding(f"collectives timed out: {sides}", timeouts[0].cite)


def _compare(source: str, found: list[Enqueued], people: People) -> Iterator[tuple[str, Finding]]:
    seqs = {one.rank: one.seq for one in found}
    ops = {one.rank: (one.op, one.size) for one in found}
    first = found[0]
    what = {"ras": "NCCL RAS", "recorder": "flight recorder"}.get(source, source)
    if len(set(seqs.values())) > 1:
        behind = [rank for rank, seq in seqs.items() if seq == min(seqs.values())]
        odd = _minority(seqs) or (behind if len(behind) < len(seqs) else [])
        text = f"{what}: {_sides({one.rank: f'collective {one.seq}' + (f' ({one.op})' if one.op else '') for one in found})}"
        cite = next((one.cite for one in found if one.rank in odd), first.cite)
        # RAS has named the wrong side before: its word is given, its culprit is not.
        yield "enqueued_differ", Finding(text, cite, people(odd) if source != "ras" else ())
    elif len(set(ops.values())) > 1 and all(op for op, _ in ops.values()):
        sides = _sides({one.rank: " ".join(filter(None, (one.op, one.size))) for one in found})
        text = f"{what}: collective {first.seq} was entered as {sides}"
        yield "enqueued_differ", Finding(text, first.cite, people(_minority(ops)))
    else:
        states = {one.rank: one.state for one in found}
        state = _sides(states) if len(set(states.values())) > 1 else first.state
        text = f"{what}: every rank has enqueued {first.seq} collectives{f', {state}' if state else ''}"
        yield "enqueued_equal", Finding(text, first.cite)
        late = [rank for rank, said in states.items() if said == "scheduled"]
        if late and len(late) < len(states) and all(said in ("scheduled", "started") for said in states.values()):
            yield "recorder_split", Finding(f"{text}: the stream of some ranks never reached it", first.cite, people(late))
        elif all(
            one.state == "started" or (not one.state and (one.completed or 0) < one.seq and one.completed is not None) for one in found
        ):
            yield "collective_open", Finding(f"{what}: every rank is inside collective {first.seq} and none has completed it", first.cite)


def missing(scene: Scene) -> Iterator[Missing]:
    """Ranks that a recorder or a time-out should tell of and does not: each may be the one that did not come."""
    told = {one.rank for one in scene.enqueued if one.source == "recorder"}
    timed = {int(notice.fields["rank"]) for notice in scene.notices("collective_timeout")}
    for what, ranks in (("the flight recorder", told), ("a time-out", timed)):
        silent = sorted(set(range(max(ranks, default=0))) - ranks)
        if silent and len(ranks) > 1 and len(silent) <= len(ranks):
            names = ", ".join(map(str, silent[:8]))
            yield Missing(f"{what} of rank {names}", "not in the evidence; a rank that is missing may be the one that did not come")


def _minority(values: Mapping[int, object]) -> list[int]:
    counts = Counter(values.values()).most_common()
    if len(counts) < 2 or counts[0][1] == counts[1][1]:
        return []
    return [rank for rank, value in values.items() if value != counts[0][0]]


def _sides(texts: dict[int, str]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, text in texts.items():
        sides.setdefault(text or "?", []).append(rank)
    return ", ".join(
        f"{text} on rank{'s' if len(r) > 1 else ''} {', '.join('(unnamed)' if n < 0 else str(n) for n in sorted(r))}"
        for text, r in sides.items()
    )
