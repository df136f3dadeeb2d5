"""One run of an experiment: streams up, watch, streams down, and what may be said of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from monitors import fleet
from monitors.capture import bundle
from monitors.capture.manifest import BundleError
from opsctl.load.asked import Asked
from opsctl.load.client import Client, NoServer
from opsctl.load.shapes import PLAIN
from opsctl.repro import overlap
from opsctl.repro.conclusion import Latency, Outcome, Run, outcome
from opsctl.repro.experiment import Experiment
from opsctl.repro.overlap import Interval, Measured
from opsctl.repro.streams import Streams
from opsctl.repro.watch import Fault, Watcher, brought, until_fault

_TELL_S = 15.0
_CAPTURE_S = 20.0
_STEADY_S = 60.0


@dataclass(frozen=True)
class Site:
    """Whom to ask, and where evidence goes. ``deployment`` None: only the address is known, and streams must tell."""

    url: str
    key: str = ""
    model: str = ""
    deployment: fleet.Deployment | None = None
    bundles: Path | None = None


class NotSteady(Exception):
    """The server does not serve before the experiment has begun: whatever came would be no result of it."""


async def run(experiment: Experiment, site: Site, seed: int, say: Callable[[str], None]) -> Run:
    """Never longer than the experiment's seconds, one request before and one capture after.

    Raises:
        NoServer: nothing answers. NotSteady: something does, but a plain request has no good answer.
    """
    async with Client(site.url, model=site.model, key=site.key, deadline_s=experiment.request_s) as client:
        await client.find_model()
        await _steady(client, seed)
        streams = Streams(client, experiment, seed)
        watcher = Watcher(site.deployment, experiment.overlap.agents, client.clock) if site.deployment else None
        begun = client.clock()
        streams.until_s = begun + experiment.seconds
        tasks = streams.tasks()
        telling = asyncio.create_task(_tell(streams, begun, say))
        try:
            seen = await _watched(streams, watcher, experiment, tasks)
            ended = client.clock()
        finally:
            for task in (*tasks, telling):
                task.cancel()
            await asyncio.gather(*tasks, telling, return_exceptions=True)
            boxes = watcher.overlap() if watcher else None
            if watcher is not None:
                await asyncio.to_thread(watcher.close)
        verdict, kept, notes = "", "", tuple[str, ...]()
        if seen is not None and site.deployment is not None:
            say("the fault is here; evidence is taken")
            try:
                taken = await asyncio.to_thread(_capture, site, ended - seen.began_s)
                verdict, kept = taken.verdict.verdict.value, str(taken.folder)
            except (OSError, BundleError) as error:  # that the fault has come is a result all the same
                notes = (f"the evidence could not be kept: {error}",)
        return msgspec.structs.replace(_told(experiment, streams, seen, ended - begun, boxes, verdict, kept), notes=notes)


async def _steady(client: Client, seed: int) -> None:
    """A server that is wedged already would seem to reproduce anything."""
    try:
        async with asyncio.timeout(_STEADY_S):
            came = await client.learn_tokens(PLAIN, random.Random(f"steady/{seed}"))
    except TimeoutError as error:
        raise NotSteady(f"{client.base}: a plain request had no answer within {_STEADY_S:g} s") from error
    if not came.ok:
        raise NotSteady(f"{client.base}: a plain request came to: {came.error}{f' ({came.note})' if came.note else ''}")


async def _watched(streams: Streams, watcher: Watcher | None, experiment: Experiment, tasks: Sequence[asyncio.Task[None]]) -> Fault | None:
    """Until the fault, the end of the time, or the last request under suspicion."""
    first = experiment.agents.streams
    watching = asyncio.create_task(until_fault(streams, watcher, experiment.stall_s))
    probing = asyncio.create_task(_finished(tasks[first : first + experiment.probes.streams]))
    both: list[asyncio.Task[Any]] = [watching, probing]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            return watching.result()
        probing.result()
        return None
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _finished(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


def _capture(site: Site, quiet_s: float) -> bundle.Captured:
    assert site.deployment is not None
    budget = min(_CAPTURE_S, bundle.budget(site.deployment, quiet_s))
    progress = {"state": "stalled", "stalled_s": round(quiet_s, 2)}
    return bundle.capture(site.deployment, reason="repro", budget_s=budget, root=site.bundles, progress=progress)


async def _tell(streams: Streams, begun: float, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(_TELL_S)
        longest = max((context.most_tokens for context in streams.contexts), default=0)
        say(f"{streams.client.clock() - begun:.0f} s: {len(streams.agents)} turns, {len(streams.probes)} requests under suspicion, "
            f"context {longest} tokens")  # fmt: skip


def _told(
    experiment: Experiment, streams: Streams, seen: Fault | None, seconds: float, boxes: Measured | None, verdict: str, kept: str
) -> Run:
    refused = experiment.probes.refused
    good = [a for a in streams.probes if a.ok]
    turns = [a for a in streams.agents if a.ok]
    took = [a.seconds for a in good]
    prefills = streams.whole(streams.prefills, "prefill")
    beside = [a.seconds for a in good if _inside(a, prefills)]
    return Run(
        seconds=seconds,
        turns=len(turns),
        turn_errors=_errors(streams.agents),
        probes=len(streams.probes),
        expected=len(good),
        probe_errors=_errors(streams.probes),
        overlap=_overlap(experiment, streams, boxes),
        fault=seen.text if seen else "",
        after_s=_after(streams, seen) if seen else None,
        verdict=verdict,
        bundle=kept,
        refusals=Latency.of(took) if refused else None,
        refusals_beside_prefill=Latency.of(beside) if refused and prefills else None,
        answers=None if refused else Latency.of(took),
        prefills=len(streams.prefills),
        open=len(streams.left),
        most_context=max((context.most_tokens for context in streams.contexts), default=0),
        tokens_per_s=sum(a.tokens or len(a.moments_s) for a in turns) / max(seconds, 1e-9),
    )


def _overlap(experiment: Experiment, streams: Streams, boxes: Measured | None) -> Measured:
    """The server's own word where it tells the requests apart: only masked ones bear a mark. What is refused never
    decodes: then it counts that the loop went on meanwhile."""
    needed = experiment.overlap.agents
    if experiment.probes.refused:
        return overlap.by_streams(streams.whole(streams.probes, "probe"), streams.whole(streams.agents, "agent"), needed)
    if boxes is not None and experiment.probes.constrained:
        return boxes
    return overlap.by_streams(streams.decoding("probe"), streams.decoding("agent"), needed)


def _errors(answers: Sequence[Asked]) -> dict[str, int]:
    return dict(Counter(a.error for a in answers if a.error).most_common())


def _inside(answer: Asked, intervals: Sequence[Interval]) -> bool:
    return any(begin < answer.begun_s + answer.seconds and answer.begun_s < end for begin, end in intervals)


def _after(streams: Streams, seen: Fault) -> float | None:
    held = [one.begun_s for one in (*streams.open, *streams.left) if one.kind == "probe"]
    begun = brought(held, [a.begun_s for a in streams.probes], seen.began_s)
    return None if begun is None else max(0.0, seen.began_s - begun)


async def repeat(
    experiment: Experiment, site: Site, seed: int, say: Callable[[str], None]
) -> tuple[list[Run], NoServer | NotSteady | None]:
    """Run after run, until one has reproduced the fault: a server that is wedged answers no further run. With them why
    the next one could not begin, if so. Raises NoServer and NotSteady before the first."""
    runs: list[Run] = []
    for number in range(experiment.runs):
        say(f"run {number + 1} of {experiment.runs}, at most {experiment.seconds:g} s")
        try:
            found = await run(experiment, site, seed + number, say)
        except (NoServer, NotSteady) as error:
            if not runs:
                raise
            return runs, error
        runs.append(found)
        told, why = outcome(experiment, found)
        say(f"run {number + 1}: {told}: {why}")
        if told is Outcome.reproduced:
            break
    return runs, None
