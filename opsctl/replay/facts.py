"""What each kind of step measures. A step's ``holds`` and the table's cells name these fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Facts = Mapping[str, Any]


class Wedged(msgspec.Struct, frozen=True):
    """``after_s``: from the constrained request to rank 0's last progress, by its black box. ``health``: the status of
    GET /health while it stands still. ``turns``: of the loop before it."""

    after_s: float
    health: int
    phase: str
    turns: int


class Captured(msgspec.Struct, frozen=True):
    """Seconds after the last progress, by the monitor's own events. ``before_watchdog_s``: what was left of the engine's
    watchdog when the bundle was whole. ``ranks``: whose black box is in it. ``valid``: every item is as its digest says."""

    declared_s: float
    captured_s: float
    before_watchdog_s: float
    items: int
    ranks: int
    verdict: str
    confidence: float
    valid: bool
    paged: bool
    bundle: str


class Reproduced(msgspec.Struct, frozen=True):
    """What ``opsctl repro run`` said. ``after_s``: from the request under suspicion to the hang. ``overlap``: the share of
    its decoding beside which the loop decoded. Latencies are those of the requests under suspicion; ``turn_errors`` are turns
    of the loop that had no good answer."""

    exit_code: int
    outcome: str
    why: str
    seconds: float
    turns: int
    probes: int
    expected: int
    verdict: str
    overlap: float | None
    after_s: float | None
    p50_s: float | None
    p99_s: float | None
    most_s: float | None
    over_1s: int
    turn_errors: int
    scaled: str


class Changed(msgspec.Struct, frozen=True):
    """What ``opsctl rollout apply`` did.

    ``failed``: the check that turned it back. ``failed_starts``: by the journal, of the node with the most. ``unnoticed_s``:
    from the start of the changed group to the rollout's knowing that it failed. ``first_answer_s``: from the order to restart
    to the first real completion. ``stable_s``: how long it was watched before the commit. ``old_tracebacks``: in the units'
    journals when the change began. ``elsewhere``: what the clients' gateway had answered by somebody else. ``one_before`` to
    ``four_after``: tokens in a second with one stream and four.
    """

    exit_code: int
    state: str
    why: str
    failed: str = ""
    seconds: float = 0.0
    failed_starts: int = 0
    unnoticed_s: float | None = None
    without_service_s: float | None = None
    first_answer_s: float | None = None
    stable_s: float | None = None
    old_tracebacks: int = 0
    elsewhere: int = 0
    paged: bool | None = None
    one_before: float | None = None
    four_before: float | None = None
    one_after: float | None = None
    four_after: float | None = None


class Whole(msgspec.Struct, frozen=True):
    """Over all steps that were played. ``restart_*``: from an order to restart to the first real completion, whoever gave
    it. ``turns``: of every loop."""

    hangs: int
    hang_least_s: float | None
    hang_most_s: float | None
    restarts: int
    restart_least_s: float | None
    restart_most_s: float | None
    turns: int
    minutes: float


KINDS: Mapping[str, type[msgspec.Struct]] = {"wedge": Wedged, "capture": Captured, "repro": Reproduced, "rollout": Changed}


def names(kind: str) -> tuple[str, ...]:
    """The facts of a kind of step; of the whole day, for ``day``."""
    return tuple(one.name for one in msgspec.structs.fields(Whole if kind == "day" else KINDS[kind]))


def whole(found: Mapping[str, msgspec.Struct], restarts: Sequence[float], seconds: float) -> Whole:
    """``restarts``: those that no rollout made."""
    hangs = [one.after_s for one in found.values() if isinstance(one, Wedged)]
    hangs += [
        one.after_s for one in found.values() if isinstance(one, Reproduced) and one.outcome == "reproduced" and one.after_s is not None
    ]
    answers = [*restarts, *(one.first_answer_s for one in found.values() if isinstance(one, Changed) and one.first_answer_s is not None)]
    turns = sum(one.turns for one in found.values() if isinstance(one, Wedged | Reproduced))
    return Whole(len(hangs), min(hangs, default=None), max(hangs, default=None), len(answers), min(answers, default=None),
                 max(answers, default=None), turns, round(seconds / 60, 1))  # fmt: skip
