"""The one function that decides the accepted run. KV, grammar FSM, log-probabilities and text all take its output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Accepted:
    """What one step gives a request.

    ``tokens`` are the tokens that count, in order, never empty. The KV of all but the last of them is in the cache
    (each equals the draft that was laid out at its place). ``matched`` is the end-of-text or stop id that ended
    the request.
    """

    tokens: tuple[int, ...]
    finish: Literal["", "stop", "length"] = ""
    matched: int | None = None


def accept_run(drafts: Sequence[int], drawn: Sequence[int], *, room: int, stops: Collection[int]) -> Accepted:
    """Decide the accepted run of a verify (or, with no drafts, of a plain step).

    Args:
        drafts: tokens laid out after the last accepted one.
        drawn: one token for each position, ``1 + len(drafts)`` of them: ``drawn[i]`` was drawn from the target
            distribution given that ``drafts[:i]`` hold.
        room: how many more tokens the request may have, at least 1.
        stops: ids that end the request; the id itself is the last token of the run.

    A draft is accepted only if it equals what was drawn at its place, so the run is distributed exactly as without
    drafts. The run is cut here, and only here, at a stop id and at ``room``: whatever is cut was never accepted.
    """
    if len(drawn) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} drawn tokens, got {len(drawn)}")
    if room < 1:
        raise ValueError(f"a request with room for {room} tokens has no place in a batch")
    run: list[int] = []
    for at, token in enumerate(drawn):
        run.append(token)
        if token in stops:
            return Accepted(tuple(run), "stop", token)
        if len(run) == room:
            return Accepted(tuple(run), "length")
        if at == len(drafts) or drafts[at] != token:
            break
    return Accepted(tuple(run))
