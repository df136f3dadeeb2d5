"""Generated hours of a healthy server, look by look, and wedges that end one.

Step times, prefills and silences are drawn from what was recorded of the real engine (``recorded.json``), stretched by a
factor of each simulated server: other hardware, other models. What the engine on a CPU cannot show (a kernel that is
compiled in mid-flight, silences that end by themselves, gauges that lag) is drawn from ranges that public reports give.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monitors import engines
from monitors.judge.patience import Signs, Source
from monitors.judge.progress import Sample
from tests.slow.soak.scenes import Server

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded.json").read_text())
Looks = Iterator[tuple[Sample, str]]
_SPINS = frozenset({"grammar_barrier", "symmetric_spin", "asymmetric", "tp_desync", "host_callback", "stopped", "unknown"})
# What a healthy server is about, and how often.
_SEGMENTS = {"rest": 25, "decode": 38, "short": 12, "prefill": 12, "retraction": 3, "jit": 3, "hiccup": 3, "recovering": 1, "restart": 1,
             "rotation": 2, "unreachable": 1, "paused": 1}  # fmt: skip


def server(dialect: str, rng: random.Random) -> Server:
    ranks = rng.choice((1, 2, 4, 8))
    return Server(engines.load(dialect), ranks, gpus=rng.random() < 0.7, stacks=dialect != "generic" and rng.random() < 0.9)


@dataclass
class Traffic:
    """One server\'s life, look by look."""

    what: Server
    rng: random.Random
    now_s: float = 0.0
    work: int = 0
    life: int = 0
    unwatched_s: float = 0.0
    silences: dict[str, float] = field(default_factory=dict)  # the longest of each kind

    def __post_init__(self) -> None:
        self.stretch = self.rng.choice((0.3, 1.0, 1.0, 3.0))
        name = self.what.dialect.name
        self.boxes = name == "lastbatch"
        self.source = (
            Source.boxes if self.boxes else Source.steps if self.what.dialect.metrics.steps and self.rng.random() < 0.7 else Source.lines
        )
        self.look_s = 0.5 if self.boxes else 2.0  # what a metrics page changes with is looked at no more often
        self.step_s = self.rng.choice(RECORDED["decode_s"]) * self.stretch
        # 40 steps between two lines, or a statistics line every 10 s.
        self.interval_s = 10.0 if name in ("vllm", "generic") else max(1.0, 40 * self.step_s)

    def hours(self, count: float) -> Looks:
        until = self.now_s + count * 3600
        yield from self._restart(ordered=False)
        while self.now_s - self.unwatched_s < until:
            kind = self.rng.choices(list(_SEGMENTS), list(_SEGMENTS.values()))[0]
            yield from getattr(self, f"_{kind}")()

    def wedge(self, kind: str, most_s: float) -> Looks:
        """Some minutes of work, then nothing moves any more. The first look of the wedge bears its name."""
        yield from self._restart(ordered=False)
        for _ in range(self.rng.randrange(1, 6)):
            yield from self._decode()
        spins = kind in _SPINS and self.what.gpus
        signs = Signs(parked=self.boxes and kind not in ("cpu_bound",), spinning=spins)
        begun = self.now_s
        while self.now_s - begun < most_s:
            yield self._look(0.5, held=3, signs=signs), kind

    # The parts of an hour.

    def _rest(self) -> Looks:
        if lag := self.what.dialect.metrics.lag_s if not self.boxes else 0.0:
            yield from self._silence("lag", self.rng.uniform(0, lag))
        until = self.now_s + min(self.rng.expovariate(1 / 90), 1800)
        while self.now_s < until:
            yield self._look(4.0, held=0), "rest"

    def _decode(self) -> Looks:
        until = self.now_s + self.rng.expovariate(1 / 90) + 5
        held = self.rng.randrange(1, 40)
        while self.now_s < until:
            if self.source is Source.lines:
                yield from self._silence("decode", self.interval_s * self.rng.uniform(0.9, 1.3), held=held)
            else:
                short = self.rng.choice(RECORDED["silence_s"]) * self.stretch
                if short > 1.0:
                    yield from self._silence("decode", short, held=held)
            self.work += 1
            yield self._look(self.look_s, held=held), "decode"

    def _short(self) -> Looks:
        """Requests that come and go between two looks."""
        for _ in range(self.rng.randrange(5, 60)):
            self.work += self.boxes or self.rng.random() < 0.7
            yield self._look(self.look_s, held=self.rng.choice((0, 1, 2))), "short"

    def _prefill(self) -> Looks:
        longest = self.rng.choice(RECORDED["prefill_s"]) * self.stretch * self.rng.choice((1, 8, 60))
        length = min(longest + self.rng.lognormvariate(math.log(4), 1.0), 120.0)
        if self.boxes:  # each layer is seen
            until = self.now_s + length
            while self.now_s < until:
                self.work += 1
                yield self._look(0.5, held=2), "prefill"
            return
        yield from self._silence("prefill", length, held=2, signs=Signs(working=self.what.gpus))
        yield from self._moved()

    def _retraction(self) -> Looks:
        for _ in range(self.rng.randrange(4, 20)):
            yield from self._silence("retraction", self.rng.uniform(0.5, 3.0 if self.boxes else 9.0), held=60)
            yield from self._moved()

    def _jit(self) -> Looks:
        """A kernel is compiled in mid-flight. The bundled engine builds its own before it serves."""
        for _ in range(self.rng.randrange(1, 4)):
            length = self.rng.uniform(0.2, 3.5) if self.boxes else min(self.rng.lognormvariate(math.log(15), 0.9), 140.0)
            told = not self.boxes and self.rng.random() < 0.6
            spins = self.what.gpus and self.what.ranks > 1  # the other ranks spin in their collective meanwhile
            yield from self._silence("jit", length, held=5, signs=Signs(spinning=spins, computing=told and not spins))
            yield from self._moved()

    def _hiccup(self) -> Looks:
        """The machine is overloaded, swaps or is frozen for a moment."""
        yield from self._silence("hiccup", self.rng.uniform(1, 3.8) if self.rng.random() < 0.9 else self.rng.uniform(4, 9), held=4)
        yield from self._moved()

    def _recovering(self) -> Looks:
        """A silence of 20 s to 16 minutes that ends by itself, the GPU at its cap all the while."""
        if self.boxes:
            return
        length = min(20 * self.rng.paretovariate(0.9), 950.0) if self.what.gpus else self.rng.uniform(20, 120)
        yield from self._silence("recovering", length, held=6, signs=Signs(working=self.what.gpus))
        yield from self._moved()

    def _restart(self, *, ordered: bool = True) -> Looks:
        if ordered:
            for _ in range(self.rng.randrange(1, 5)):
                yield self._look(1.0, held=None), "restart"
        self.life += 1
        length = RECORDED["boot_s"] * self.rng.uniform(0.5, 30)
        until = self.now_s + length
        while self.now_s < until:
            yield self._look(2.0, held=None if not self.boxes else 1, loading=self.boxes or self.rng.random() < 0.5), "restart"
        self.work += 1
        yield self._look(1.0, held=0), "restart"

    def _rotation(self) -> Looks:
        """The log is rotated: a line is lost."""
        if self.source is Source.lines:
            yield from self._silence("rotation", 2 * self.interval_s, held=3)
        yield from self._moved()

    def _unreachable(self) -> Looks:
        until = self.now_s + self.rng.uniform(5, 90)
        while self.now_s < until:
            yield self._look(5.0, held=None), "unreachable"
        yield from self._moved()

    def _paused(self) -> Looks:
        """The monitor itself is not run for a while."""
        pause = self.rng.uniform(10, 3600)
        self.now_s += pause
        self.unwatched_s += pause
        yield from self._moved()

    def _silence(self, kind: str, length: float, *, held: float = 1, signs: Signs | None = None) -> Looks:
        self.silences[kind] = max(self.silences.get(kind, 0.0), length)
        until = self.now_s + length
        while self.now_s < until:
            yield self._look(min(0.5 if length < 60 else 1.0, until - self.now_s + 1e-3), held=held, signs=signs), kind

    def _moved(self) -> Looks:
        for _ in range(3):
            self.work += 1
            yield self._look(self.look_s, held=2), "decode"

    def _look(self, after_s: float, *, held: float | None, signs: Signs | None = None, loading: bool = False) -> Sample:
        self.now_s += after_s
        signs = signs or Signs(parked=self.boxes and self.rng.random() < 0.5)
        # Without black boxes nothing tells one start of a server from the next but the log.
        life = f"life-{self.life}" if self.boxes else ""
        return Sample(self.now_s, held, self.work, life, loading, False, self.work if self.boxes else None, self.source, signs,
                      exact=self.boxes, lag_s=self.what.dialect.metrics.lag_s if not self.boxes else 0.0)  # fmt: skip
