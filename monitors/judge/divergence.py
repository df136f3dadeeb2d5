"""Compare the black boxes of all ranks: who laid out, accepted or entered something else than the others.

Only steps that every box still holds are compared. A rank that has begun a step which another has not is no
divergence by itself: ranks run at their own pace between collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from engine.blackbox import BatchKind, CollectiveKind, DeviceState, EventKind, RequestFlag, Snapshot

_STEPS_COMPARED = 16
V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True)
class Batch:
    """A batch as one rank laid it out. ``rows`` are (request hash, KV length before, tokens laid out)."""

    step: int
    kind: BatchKind
    tokens: int
    rows: tuple[tuple[int, int, int], ...]
    grammar: bool


@dataclass(frozen=True)
class Difference:
    """``ranks`` is the minority (empty where there is none to tell). ``text`` says what each side has."""

    text: str
    ranks: tuple[int, ...]


def batches(box: Snapshot) -> list[Batch]:
    """All batches in the ring, oldest first."""
    found: list[Batch] = []
    for event in box.events:
        if event.kind is EventKind.batch_begin and event.sub in BatchKind._value2member_map_:
            found.append(Batch(event.a, BatchKind(event.sub), event.b, (), False))
        elif event.kind is EventKind.batch_request and found:
            last = found[-1]
            masked = last.grammar or bool(event.flags & RequestFlag.grammar)
            found[-1] = Batch(last.step, last.kind, last.tokens, (*last.rows, (event.a, event.b, event.c)), masked)
    return found


def grammar_verify(boxes: Mapping[int, Snapshot]) -> Batch | None:
    """The latest of each rank's last two batches that is a verify with a grammar-masked request in it."""
    recent = [batch for box in boxes.values() for batch in batches(box)[-2:]]
    return max((b for b in recent if b.kind is BatchKind.verify and b.grammar), key=lambda b: b.step, default=None)


def layout(boxes: Mapping[int, Snapshot]) -> Difference | None:
    """The first step among the last that all ranks share at which they laid out different batches."""
    by_rank = {rank: {batch.step: batch for batch in batches(box)} for rank, box in boxes.items()}
    for step in _shared(by_rank):
        here = {rank: steps[step] for rank, steps in by_rank.items()}
        found = _minority({rank: (b.kind, b.tokens, b.rows) for rank, b in here.items()})
        if found is not None:
            return Difference(f"step {step} was laid out with " + _sides({rank: _shape(b) for rank, b in here.items()}), found)
    return None


def _shape(batch: Batch) -> str:
    kv = sum(length for _, length, _ in batch.rows)
    return f"{batch.tokens} tokens behind {kv} of KV in {len(batch.rows)} requests"


def accepted(boxes: Mapping[int, Snapshot]) -> Difference | None:
    """The first step at which ranks accepted different lengths for one request."""
    by_rank: dict[int, dict[tuple[int, int], int]] = {
        rank: {(e.d, e.a): e.b for e in box.events if e.kind is EventKind.accepted} for rank, box in boxes.items()
    }
    for key in _shared(by_rank):
        here = {rank: lengths[key] for rank, lengths in by_rank.items()}
        found = _minority(here)
        if found is not None:
            sides = _sides({rank: f"{length} tokens" for rank, length in here.items()})
            return Difference(f"at step {key[0]} request {key[1]:016x} was accepted with {sides}", found)
    return None


def _in_collective(boxes: Mapping[int, Snapshot]) -> dict[int, Snapshot]:
    return {rank: box for rank, box in boxes.items() if box.device.state is DeviceState.collective}


def sequence(boxes: Mapping[int, Snapshot]) -> Difference | None:
    """Ranks that are in a collective, but not in the same one by its number."""
    here = {rank: box.device.enqueued for rank, box in _in_collective(boxes).items()}
    found = _minority(here)
    return None if found is None else Difference("the open collective is " + _sides({r: f"number {n}" for r, n in here.items()}), found)


def payload(boxes: Mapping[int, Snapshot]) -> Difference | None:
    """Ranks that entered the same collective by its number with another size or kind."""
    waiting = _in_collective(boxes)
    if len({box.device.enqueued for box in waiting.values()}) != 1:
        return None
    here = {rank: (box.device.kind, box.device.nbytes) for rank, box in waiting.items()}
    found = _minority(here)
    if found is None:
        return None
    number = next(iter(waiting.values())).device.enqueued
    return Difference(
        f"collective number {number} was entered as " + _sides({r: f"{_kind(k)} of {n} bytes" for r, (k, n) in here.items()}), found
    )


def _kind(value: int) -> str:
    return CollectiveKind(value).name if value in CollectiveKind._value2member_map_ else f"kind {value}"


K = TypeVar("K", int, tuple[int, int])


def _shared(by_rank: Mapping[int, Mapping[K, object]]) -> list[K]:
    if len(by_rank) < 2:
        return []
    common = set.intersection(*(set(keys) for keys in by_rank.values()))
    return sorted(common)[-_STEPS_COMPARED:]


def _minority(values: Mapping[int, V]) -> tuple[int, ...] | None:
    """The ranks whose value is not the most common one; None when all agree, empty when there is no majority."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    (first, most), (_, second), *_rest = counts.most_common()
    return tuple(rank for rank, value in values.items() if value != first) if most > second else ()


def _sides(texts: Mapping[int, str]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, text in texts.items():
        sides.setdefault(text, []).append(rank)
    return ", ".join(f"{text} by rank{'s' if len(r) > 1 else ''} {', '.join(map(str, sorted(r)))}" for text, r in sides.items())
