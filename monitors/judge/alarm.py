"""Does a verdict page now, later, or not at all? Pure.

An alarm is a page. A silence that ended by itself is a record. A verdict that rests on ranks which wait for each other
or stand stopped pages at once; one that a long kernel or compilation would look like too, or that has little evidence,
pages when the work still lies at the ceiling.
"""

from __future__ import annotations

import enum

from monitors.judge.patience import NO_SIGNS, Limits, Signs, Source
from monitors.judge.verdict import Class, Verdict

_UNSURE = 0.5
_WORKS_S = 1200.0  # while GPUs draw what they draw at work: silences of a quarter of an hour have ended by themselves
_COMPILES_S = 30.0  # black boxes: an engine whose kernels are built before it serves has nothing longer to compile
_COMPILES = frozenset({Class.hang_cpu_bound, Class.hang_unknown})
# Where no black box speaks: one rank busy on the host while others wait is a compilation as well.
_MAY_COMPILE = frozenset({*_COMPILES, Class.hang_asymmetric})


class Due(enum.StrEnum):
    now = "now"
    later = "later"
    never = "never"


def due(verdict: Verdict, *, lies: bool, quiet_s: float, source: Source, limits: Limits, signs: Signs = NO_SIGNS) -> Due:
    """Whether a verdict pages.

    Args:
        lies: the stall of which it speaks goes on (for a crash or corruption: irrelevant).
        quiet_s: how long it has gone on [s].
    """
    if not verdict.verdict.is_alarm:
        return Due.never
    if not verdict.verdict.is_hang:
        return Due.now
    if not lies:
        return Due.never
    if source is Source.boxes:
        may_end = verdict.verdict in _COMPILES
    else:
        # Ranks that wait on the device look alike behind a long kernel and behind one that spins: power tells.
        may_end = verdict.blind or verdict.verdict in _MAY_COMPILE or (verdict.verdict is Class.hang_symmetric_spin and not signs.spinning)
    if not may_end and verdict.confidence >= _UNSURE:
        return Due.now
    wait = max(wait_s(source, limits), _WORKS_S) if signs.working and source is not Source.boxes else wait_s(source, limits)
    return Due.now if quiet_s >= wait else Due.later


def acts(verdict: Verdict, found: Due, *, still_open: bool) -> bool:
    """Whether ``on_wedge`` is due. What it does ends a server's work, so it follows a page and no mere record, and only while the
    incident is open: a server that has ended since is its service manager's to start."""
    return found is Due.now and verdict.verdict.is_hang and still_open


def wait_s(source: Source, limits: Limits) -> float:
    """How long work must lie before a verdict that may be a long kernel or compilation pages."""
    if limits.stall_s is not None:
        return limits.stall_s
    return min(_COMPILES_S, limits.ceiling_s) if source is Source.boxes else limits.ceiling_s
