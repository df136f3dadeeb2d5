"""What a step gave, as the runner reports it and the scheduler reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.messages import Finish, TokenLogprob
from engine.scheduler.plan import Plan


@dataclass(frozen=True)
class RowResult:
    """One row's accepted run. ``kv_len`` is the request's KV length after it; ``tokens`` is empty for a prefill
    chunk that is not the last."""

    rid: str
    tokens: tuple[int, ...]
    finish: Finish
    matched: int | None
    kv_len: int
    drafted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    blamed: bool = False  # the error is the request's own doing


@dataclass(frozen=True)
class Results:
    """``executed`` counts the tokens that went through the model, ``useful`` those that count: prompt tokens and
    accepted ones."""

    step: int
    rows: tuple[RowResult, ...]
    executed: int
    useful: int

    @property
    def finished(self) -> set[str]:
        return {row.rid for row in self.rows if row.finish}


class Launched(Protocol):
    """A step on its way. It is collected exactly once."""

    @property
    def plan(self) -> Plan: ...


class Runner(Protocol):
    """Carries out plans: the model's executor, over all ranks, or a script in a test."""

    def launch(self, plan: Plan) -> Launched:
        """Send a plan to every rank and start it. Returns at once."""
        ...

    def collect(self, launched: Launched) -> Results:
        """Wait for a step's accepted run and commit it: tokens, KV lengths, grammar FSM."""
        ...
