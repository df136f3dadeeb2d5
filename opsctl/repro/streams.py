"""The streams of one run: agents, requests under suspicion and long prefills, each recorded with when it decoded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opsctl.load.asked import Asked
from opsctl.load.client import Client
from opsctl.load.shapes import Shape
from opsctl.repro.context import Context
from opsctl.repro.experiment import CONSTRAINED, Experiment
from opsctl.repro.overlap import Interval

_PAUSE_S = 0.5  # after a turn that failed
_TEXT = "Describe one item in the cupboard as JSON with item and count."


@dataclass
class Open:
    """A request that has no whole answer yet. ``parts`` are when pieces of it came, on the client's clock."""

    kind: str  # agent | probe | prefill
    begun_s: float
    parts: list[float] = field(default_factory=list)

    @property
    def last_s(self) -> float:
        return self.parts[-1] if self.parts else self.begun_s


@dataclass
class Streams:
    """What runs and what came. ``until_s``: the run's end on the client's clock."""

    client: Client
    experiment: Experiment
    seed: int
    until_s: float = 0.0
    open: list[Open] = field(default_factory=list)
    agents: list[Asked] = field(default_factory=list)
    probes: list[Asked] = field(default_factory=list)
    prefills: list[Asked] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    left: list[Open] = field(default_factory=list)  # open when the run was ended
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # every agent has decoded

    def tasks(self) -> list[asyncio.Task[None]]:
        """Start all of them."""
        plan = self.experiment
        work = [self._agent(number) for number in range(plan.agents.streams)]
        work += [self._probe(number) for number in range(plan.probes.streams)]
        work += [self._prefill(number) for number in range(plan.prefills.streams if plan.prefills else 0)]
        if not plan.agents.streams:
            self.ready.set()
        return [asyncio.create_task(one) for one in work]

    async def _agent(self, number: int) -> None:
        plan = self.experiment.agents
        context = Context(plan.context_tokens, plan.max_tokens, system=f"You are agent {number} and keep a log. Answer in full sentences.")
        self.contexts.append(context)
        shape = Shape(name="agent", max_tokens=plan.max_tokens, ignore_eos=True)
        while self.client.clock() < self.until_s:
            body = {**shape.body(self.client.model, random.Random(0)), "messages": context.ask()}
            came = await self._send("agent", shape, body)
            self.agents.append(came)
            if came.ok:
                context.answered(came.text, came.prompt_tokens)
            elif came.status == 400:
                context.refused()
            else:
                context.failed()
                await asyncio.sleep(_PAUSE_S)

    async def _probe(self, number: int) -> None:
        plan = self.experiment.probes
        await self.ready.wait()
        chance = random.Random(f"probe/{self.seed}/{number}")
        first = self.client.clock()
        for count in range(plan.most):
            due = first + count * plan.every_s
            if plan.every_s and due > self.client.clock():
                await asyncio.sleep(due - self.client.clock())
            if self.client.clock() >= self.until_s or len(self.probes) >= plan.most:
                return
            text = f"{_TEXT} Item number {chance.randrange(10_000)}."
            form = CONSTRAINED if plan.constrained else None
            shape = Shape(name="probe", prompt=text, max_tokens=plan.max_tokens, expect=plan.expect, response_format=form,
                          ignore_eos=not plan.constrained, extra=plan.body)  # fmt: skip
            self.probes.append(await self._send("probe", shape, shape.body(self.client.model, chance)))

    async def _prefill(self, number: int) -> None:
        assert self.experiment.prefills is not None
        await self.ready.wait()
        chance = random.Random(f"prefill/{self.seed}/{number}")
        shape = Shape(name="prefill", prompt_tokens=self.experiment.prefills.prompt_tokens, max_tokens=1)
        while self.client.clock() < self.until_s:
            body = shape.body(self.client.model, chance, tokens_per_word=self.client.tokens_per_word)
            came = await self._send("prefill", shape, body)
            self.prefills.append(came)
            if not came.ok:
                await asyncio.sleep(_PAUSE_S)

    async def _send(self, kind: str, shape: Shape, body: dict[str, Any]) -> Asked:
        one = Open(kind, self.client.clock())
        self.open.append(one)

        def part(moment: float) -> None:
            one.parts.append(moment)
            decoding = sum(1 for other in self.open if other.kind == "agent" and other.parts)
            if decoding >= self.experiment.agents.streams:
                self.ready.set()

        ended = False
        try:
            came = await self.client.send(shape, body, on_part=part)
            ended = True
            return came
        finally:
            self.open.remove(one)
            if not ended:
                self.left.append(one)

    @property
    def done(self) -> list[Asked]:
        return [*self.agents, *self.probes, *self.prefills]

    # What came of it.

    def decoding(self, kind: str) -> list[Interval]:
        """When requests of a kind decoded: from the first to the last part, those that were cut off at the end included."""
        done = self.agents if kind == "agent" else self.probes
        found = [(a.begun_s + a.moments_s[0], a.begun_s + a.moments_s[-1]) for a in done if len(a.moments_s) > 1]
        return found + [(one.parts[0], one.parts[-1]) for one in (*self.open, *self.left) if one.kind == kind and len(one.parts) > 1]

    def whole(self, done: Sequence[Asked], kind: str) -> list[Interval]:
        """From the question to the last word."""
        unended = [(one.begun_s, one.last_s) for one in (*self.open, *self.left) if one.kind == kind]
        return [(a.begun_s, a.begun_s + a.seconds) for a in done] + unended
