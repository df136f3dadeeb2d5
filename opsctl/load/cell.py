"""One measurement: a closed loop of so many streams, or an open one at a rate, bounded in requests and in time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from opsctl.load import asked
from opsctl.load.asked import Asked
from opsctl.load.figures import percentile
from opsctl.load.shapes import Mix, Shape

_BEAT_S = 0.02
_One = Callable[[int], Coroutine[Any, Any, None]]


class Asks(Protocol):
    """What sends requests (``client.Client``)."""

    @property
    def clock(self) -> Callable[[], float]: ...

    async def ask(self, shape: Shape, chance: random.Random, *, until: float) -> Asked: ...


@dataclass(frozen=True)
class Level:
    """How hard is asked. ``streams`` for a closed loop, ``rate`` (requests a second, Poisson) for an open one, where
    ``streams`` is the most that may be open: an arrival above it is counted as not sent."""

    streams: int
    rate: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.rate:g}/s" if self.rate else str(self.streams)


@dataclass(frozen=True)
class Bounds:
    """No request begins after ``requests`` of them or ``seconds``; what is open then may take ``grace_s`` more."""

    requests: int
    seconds: float
    grace_s: float


@dataclass(frozen=True)
class Ran:
    """What came of it. ``wall_s``: from the first request's begin to the last one's end. ``client_cpu``: share of one core
    that this client used; ``lag_p99_s``: how late its own loop ran. Both say whether the client was the bottleneck."""

    level: Level
    answers: tuple[Asked, ...]
    wall_s: float
    client_cpu: float
    lag_p99_s: float


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Arrival times [s] from 0: the gaps of a Poisson process, always the same for a seed."""
    chance, at = random.Random(f"arrivals/{seed}"), 0.0
    while True:
        at += chance.expovariate(rate)
        yield at


async def run(client: Asks, mix: Mix, level: Level, bounds: Bounds, *, first: int = 0) -> Ran:
    """Measure. ``first``: the number of the first request, so that repetitions ask different things."""
    clock = client.clock
    begun, cpu = clock(), time.process_time()
    until = begun + bounds.seconds + bounds.grace_s
    answers: list[Asked] = []
    lags: list[float] = []
    beat = asyncio.create_task(_beat(lags))

    async def one(number: int) -> None:
        shape, chance = mix.draw(number)
        answers.append(await client.ask(shape, chance, until=until))

    def drop(number: int) -> None:
        answers.append(Asked(mix.draw(number)[0].name, clock(), 0.0, error=asked.DROPPED))

    numbers = iter(range(first, first + bounds.requests))
    try:
        if level.rate:
            await _open(one, drop, numbers, level, mix.seed, begun, begun + bounds.seconds, clock)
        else:
            await _closed(one, numbers, level, begun + bounds.seconds, clock)
    finally:
        beat.cancel()
    wall = max((a.begun_s + a.seconds for a in answers), default=begun) - begun
    shifted = tuple(replace(a, begun_s=a.begun_s - begun) for a in sorted(answers, key=lambda a: a.begun_s))
    share = (time.process_time() - cpu) / max(clock() - begun, 1e-9)
    return Ran(level, shifted, max(wall, 1e-9), share, percentile(lags, 0.99) if lags else 0.0)


async def _closed(one: _One, numbers: Iterator[int], level: Level, ends: float, clock: Callable[[], float]) -> None:
    async def stream() -> None:
        while clock() < ends and (number := next(numbers, None)) is not None:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(level.streams):
            group.create_task(stream())


async def _open(one: _One, drop: Callable[[int], None], numbers: Iterator[int], level: Level, seed: int,
                begun: float, ends: float, clock: Callable[[], float]) -> None:  # fmt: skip
    running: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:
        for number, at in zip(numbers, poisson(level.rate, seed), strict=False):
            if begun + at >= ends:
                return
            await asyncio.sleep(max(0.0, begun + at - clock()))
            if len(running) >= level.streams:
                drop(number)
                continue
            task = group.create_task(one(number))
            running.add(task)
            task.add_done_callback(running.discard)


async def _beat(lags: list[float]) -> None:
    """How much later than asked this loop comes back to a task: the client's own delay in every time it takes."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _BEAT_S
        await asyncio.sleep(_BEAT_S)
        lags.append(loop.time() - due)
