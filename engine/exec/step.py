"""A step on its way, and what a rank knows of the requests in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.blackbox import RequestFlag
from engine.exec.device import Event
from engine.exec.sampler import Sampled
from engine.messages import Sampling, TokenLogprob
from engine.scheduler.plan import Plan, Row
from engine.speculation.drafters import Drafter

if TYPE_CHECKING:
    from engine.grammar.backends import Matcher


@dataclass
class SequenceState:
    """What a rank knows of a request. ``tokens[kv_len:]`` are not in the KV cache yet."""

    rid: str
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    room: int
    stops: frozenset[int]
    drafter: Drafter
    logprobs: int
    prompt_logprobs: int
    flags: RequestFlag
    matcher: Matcher | None = None
    pages: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    kv_len: int = 0
    scored: list[TokenLogprob] = field(default_factory=list)
    error: str = ""  # why it cannot go on: it ends with this step, and nobody else does
    blamed: bool = False  # it is the request's own doing

    @property
    def room_left(self) -> int:
        return self.room - (len(self.tokens) - self.prompt_length)


@dataclass
class Laid:
    """One row of a step on its way."""

    row: Row
    sequence: SequenceState
    drafts: list[int]
    fed: int  # tokens laid out, drafts included
    first: int  # where its drawn tokens begin, -1 if it draws none


@dataclass
class Step:
    """A launched step. ``drawn`` and ``scored`` are filled in by the device stream."""

    plan: Plan
    rows: list[Laid]
    event: Event | None
    masked: bool
    draws: int
    logits: torch.Tensor | None = None
    drawn: Sampled | None = None
    shared: torch.Tensor | None = None
    scores: dict[str, list[TokenLogprob]] = field(default_factory=dict)
