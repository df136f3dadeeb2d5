"""A run: levels by repetitions by sides, taken in turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from opsctl.load import asked, cell, results, sides
from opsctl.load.cell import Bounds, Level
from opsctl.load.client import Client, NoServer
from opsctl.load.results import Cell, Results, Side
from opsctl.load.shapes import Mix, fresh_words
from opsctl.load.sides import Place
from opsctl.load.summary import Summary, client_bound, summarise

Say = Callable[[str], None]
_T = TypeVar("_T")
_APART = 1 << 24  # between the numbers of two levels' requests: more than a level may have


@dataclass(frozen=True)
class Plan:
    """``bounds`` are of one level of one repetition. ``warmup``: requests before the first level that are not counted.
    ``fresh``: a name of this run alone, so that no prefix cache holds its random prompts; empty: whatever is cached is."""

    mix: Mix
    levels: tuple[Level, ...]
    bounds: Callable[[Level], Bounds]
    reps: int = 3
    warmup: int = 2
    fresh: str = ""

    def longest_s(self, places: int) -> float:
        """The bound on the whole run, without boots."""
        return places * self.reps * sum(self.bounds(level).seconds + self.bounds(level).grace_s for level in self.levels)


@dataclass
class _Taken:
    place: Place
    model: str = ""
    fingerprints: set[str] = field(default_factory=set)
    reps: dict[str, list[Summary]] = field(default_factory=dict)


async def measure(plan: Plan, places: Sequence[Place], env: Mapping[str, str], say: Say, log: Path | None = None) -> Results:
    """Repetition after repetition. Sides that run already are asked in turns at each level, every other time in the other
    order (ABBA); sides that are started can only be up one at a time, so each takes all levels before the next is started.

    Raises:
        NoServer: a side does not answer at all. A single request that fails is an error in the figures.
    """
    begun, load = results.utc(), os.getloadavg()[0]
    taken = [_Taken(place) for place in places]
    if any(place.command for place in places):
        for rep in range(plan.reps):
            for one in _turn(taken, rep):
                async with sides.opened(one.place, env, log) as client:
                    one.model = client.model
                    await _warm(client, plan, one.place)
                    for at in range(len(plan.levels)):
                        await _level(client, plan, one, rep, at, say)
    else:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(sides.opened(one.place, env)) for one in taken]
            for one, client in zip(taken, clients, strict=True):
                one.model = client.model
                await _warm(client, plan, one.place)
            for rep in range(plan.reps):
                for at in range(len(plan.levels)):
                    for one, client in _turn(list(zip(taken, clients, strict=True)), rep + at):
                        await _level(client, plan, one, rep, at, say)
    cells = tuple(
        Cell(one.place.name, level.label, level.streams, level.rate, tuple(one.reps[level.label]))
        for one in taken for level in plan.levels
    )  # fmt: skip
    notes = tuple(dict.fromkeys(
        f"{c.side}, {c.level}: {why}" for c in cells for rep_ in c.reps if (why := client_bound(rep_))
    ))  # fmt: skip
    who = tuple(Side(one.place.name, one.place.url, one.model, one.place.told, tuple(sorted(one.fingerprints))) for one in taken)
    return Results(results.SCHEMA, begun, results.here(), plan.mix.seed, plan.mix.to_json(), plan.mix.digest, who, cells,
                   results.utc(), round(load, 2), notes, bool(plan.fresh))  # fmt: skip


async def _warm(client: Client, plan: Plan, place: Place) -> None:
    """Raises NoServer when not one of the warm-up's requests is answered with anything."""
    # By sides too: both may be one server.
    client.fresh = fresh_words(f"{plan.fresh}/{place.name}") if plan.fresh else ()
    came = await client.learn_tokens(plan.mix.shapes[0], random.Random(f"warm/{plan.mix.seed}"))
    for number in range(plan.warmup - 1):
        shape, chance = plan.mix.draw(-1 - number)
        await client.ask(shape, chance)
    if came.error in (asked.CONNECT, asked.TIMEOUT):
        raise NoServer(f"POST {client.base}{plan.mix.shapes[0].path}: {came.error}; is the server up?")


def _turn(these: Sequence[_T], number: int) -> Sequence[_T]:
    return these if number % 2 == 0 else these[::-1]


async def _level(client: Client, plan: Plan, one: _Taken, rep: int, at: int, say: Say) -> None:
    level = plan.levels[at]
    ran = await cell.run(client, plan.mix, level, plan.bounds(level), first=(rep * len(plan.levels) + at) * _APART)
    found = summarise(ran)
    one.reps.setdefault(level.label, []).append(found)
    one.fingerprints |= {answer.fingerprint for answer in ran.answers if answer.fingerprint}
    wrong = ", ".join(f"{count} {kind}" for kind, count in {**found.errors, **found.not_ours}.items())
    told = f"{found.ok} ok{', ' + wrong if wrong else ''}"
    how = level.label if level.rate else f"{level.label} streams"
    say(f"{one.place.name}  {how:>12}  {rep + 1}/{plan.reps}  {found.tokens_per_s:8.1f} tok/s  {told}")
