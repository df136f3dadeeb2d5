"""Has the fault come? By the streams: held work that gives nothing, or a server that is gone. By the monitor's own look
too, where the deployment's black boxes and logs can be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from engine import blackbox
from engine.blackbox import Event
from monitors import fleet
from monitors.judge.progress import Limits, Memory, State, advance
from monitors.lookout import Look, Lookout
from monitors.observe import rundir
from opsctl.load import asked
from opsctl.repro.overlap import Batches, Measured
from opsctl.repro.streams import Streams

_POLL_S = 0.5
_GONE = 3  # connections refused in a row
_STEP_S = 1.0  # within which a server that goes on gives its next part


@dataclass
class Fault:
    """``began_s``: of the silence, on the client's clock."""

    text: str
    began_s: float


def by_streams(streams: Streams, now_s: float, stall_s: float) -> Fault | None:
    """Requests that need the model are open and none of them has given anything for so long; or nobody listens any more."""
    models = {"agent", "prefill"} if streams.experiment.probes.refused else {"agent", "prefill", "probe"}
    held = [one for one in streams.open if one.kind in models]
    done = [a for a in streams.done if a.shape in models]
    if held:
        # A question that was asked after the others fell silent is no progress; an answer is.
        parts = [one.parts[-1] for one in held if one.parts] + [a.begun_s + a.seconds for a in done if a.ok]
        silent = now_s - max([*parts, min(one.begun_s for one in held)])
        if silent >= stall_s:
            return Fault(f"{len(held)} requests are open and no stream has given anything for {silent:.0f} s", now_s - silent)
    latest = sorted(streams.done, key=lambda a: a.begun_s)[-_GONE:]
    if len(latest) == _GONE and all(a.error in (asked.CONNECT, asked.CUT) for a in latest):
        return Fault("the server is gone: connections end or are refused", latest[0].begun_s)
    return None


def brought(held: Sequence[float], ended: Sequence[float], silence_s: float) -> float | None:
    """Which request under suspicion brought the silence: when it began, as the moments given. None: none was there.

    The last that was open (``held``) when the silence began. The silence counts from the last part of any stream, so a
    request that began after it, but before the next part was due, was there too; else the last that had ``ended`` by then.
    """
    before = [moment for moment in held if moment <= silence_s]
    meanwhile = [moment for moment in held if silence_s < moment <= silence_s + _STEP_S]
    if before or meanwhile:
        return max(before) if before else min(meanwhile)
    return max((moment for moment in ended if moment <= silence_s), default=None)


@dataclass
class Watcher:
    """Looks at a deployment beside the run. ``batches``: what each readable leader's ring says of shared batches."""

    deployment: fleet.Deployment
    needed: int
    clock: Callable[[], float]
    lookout: Lookout = field(init=False)
    batches: dict[str, Batches] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        self.lookout = Lookout(self.deployment)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="repro")
        self._folders = self._run_dirs() if self.lookout.dialect.black_box else []
        for path, events in self._rings():
            self.batches[path] = Batches(self.needed)
            self.batches[path].skip(events)

    async def look(self) -> Fault | None:
        """One look, in a thread of its own: a node that does not answer must not hold the streams."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._look)

    def _look(self) -> Fault | None:
        seen: Look = self.lookout.look(quiet_s=self.memory.quiet_s)
        for path, events in self._rings():
            self.batches.setdefault(path, Batches(self.needed)).take(events)
        self.memory, judgement = advance(self.memory, seen.sample, Limits())
        if judgement.state is State.stalled:
            text = f"the monitor declares a stall: {judgement.held:g} requests held, nothing moved for {judgement.quiet_s:.1f} s"
            return Fault(text, self.clock() - judgement.quiet_s)
        if judgement.state is State.ended:
            return Fault("the monitor saw the server's processes end", self.clock())
        return None

    def _rings(self) -> Iterator[tuple[str, Sequence[Event]]]:
        """The leaders' events, of boxes on this machine: a ring holds some seconds, so it is read with every look."""
        for path in (path for folder in self._folders for path in sorted(folder.glob("rank-0.box"))):
            try:
                yield str(path), blackbox.read(path).events
            except (OSError, blackbox.BoxError):
                continue

    def _run_dirs(self) -> list[Path]:
        """Of the services on this machine: a ring that comes over ssh would have been overwritten meanwhile."""
        here = [(node, service) for node in self.deployment.node if not node.ssh for service in node.service]
        found = [rundir.find(self.lookout.remotes[node.name], service, self.deployment.service) for node, service in here]
        return [Path(reading.value) for reading in found if reading.value]

    def overlap(self) -> Measured | None:
        """By the black boxes; None where none could be read."""
        return next((one.measured() for one in self.batches.values() if one.masked), None)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.lookout.close()


async def until_fault(streams: Streams, watcher: Watcher | None, stall_s: float) -> Fault | None:
    """The fault, or None when the run's time is over. Call it as a task beside the streams'."""
    clock = streams.client.clock
    while clock() < streams.until_s:
        seen = by_streams(streams, clock(), stall_s)
        if seen is None and watcher is not None:
            seen = await watcher.look()
        if seen is not None:
            return seen
        await asyncio.sleep(_POLL_S)
    return None
