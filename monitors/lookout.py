"""Look at a deployment once: black boxes, log lines, metrics, from all its nodes, as one sample and its gaps.

The look itself must never wait for a wedged server: metrics are fetched in the background and count when they come.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from monitors import engines
from monitors.capture.bundle import auth_headers
from monitors.fleet import Deployment, Node, Service
from monitors.judge.progress import Sample, from_boxes, from_signals
from monitors.judge.scene import BatchLine, Notice
from monitors.observe import batchlog, boxes, journal, logfile, metrics, rundir
from monitors.observe.batchlog import Entry
from monitors.observe.reading import Reading
from monitors.remote import Remote

_METRICS_EVERY_S = 2.0
_RUN_DIR_AGAIN_S = 10.0
_DEADLINE_S = 5.0
_GONE = frozenset({"gone", "Z", "X"})
_ORDERED = ("0/", "15/", "143")  # exit status 0, and the signal by which a service manager stops a unit, in both spellings


@dataclass(frozen=True)
class Look:
    """``boxes`` by rank, without events; ``gaps`` says what could not be read, one line each."""

    sample: Sample
    boxes: Mapping[int, boxes.Box]
    gaps: tuple[str, ...]
    notices: tuple[Notice, ...] = ()


@dataclass
class _Source:
    """What is kept for one service between two looks."""

    node: Node
    service: Service
    run_dir: str = ""
    asked_s: float = -1e9
    last: boxes.NodeBoxes | None = None
    log: logfile.Follower | None = None
    journal: journal.Journal | None = None
    first: bool = True
    seen: int = 0  # batch lines with progress
    last_batch: BatchLine | None = None
    gaps: list[str] = field(default_factory=list)


class Lookout:
    """Follows one deployment. ``close`` ends what it started on nodes."""

    def __init__(self, deployment: Deployment, clock: Callable[[], float] = time.monotonic) -> None:
        self.deployment = deployment
        self.dialect = engines.load(deployment.engine)
        self.remotes = {node.name: Remote(node) for node in deployment.node}
        self._clock = clock
        self._sources = [_Source(node, service) for node in deployment.node for service in node.service]
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=max(2, len(self._sources) + 1), thread_name_prefix="look")
        self._page: concurrent.futures.Future[Reading[bytes]] | None = None
        self._page_s = -1e9
        self._values: dict[str, float] | None = None
        self._page_gap = ""
        self._invocation = ""
        self._gone: frozenset[tuple[int, int]] = frozenset()

    def look(self) -> Look:
        now = self._clock()
        self._metrics(now)
        jobs = [self._pool.submit(self._service, source, now) for source in self._sources]
        notices = tuple(notice for job in jobs for notice in job.result())
        found = {box.rank: box for source in self._sources if source.last for box in source.last.boxes}
        ended = self._ended(found) or any(_is_end(notice) for notice in notices)
        gaps = [gap for source in self._sources for gap in source.gaps]
        if self._page_gap:
            gaps.append(self._page_gap)
        return Look(self._sample(now, found, ended), found, tuple(gaps), notices)

    def _sample(self, now: float, found: Mapping[int, boxes.Box], ended: bool) -> Sample:
        lines = sum(source.seen for source in self._sources)
        if found:
            answered = all(source.last is not None for source in self._sources)
            snapshots = {rank: box.snapshot for rank, box in found.items()}
            sample = from_boxes(now, snapshots, ended=ended, all_answered=answered)
            self._invocation = sample.invocation
            return sample
        if self.dialect.black_box:
            # No rank runs. What the log and the counters last said is about a server that is no more.
            return Sample(now, None, None, self._invocation, ended=ended)
        values = self._values or {}
        held = metrics.held(values, self.dialect)
        if held is None:
            last = [source.last_batch for source in self._sources if source.last_batch]
            held = sum(line.running + line.waiting for line in last) if last else None
        return from_signals(now, held=held, work=(metrics.progress(values, self.dialect), lines), ended=ended)

    def _ended(self, found: Mapping[int, boxes.Box]) -> bool:
        """A rank whose process has gone while its box stays, twice in a row: an ordered shutdown removes the box just
        before the process ends."""
        gone = frozenset((box.rank, box.snapshot.header.pid) for box in found.values() if box.state in _GONE)
        twice, self._gone = gone & self._gone, gone
        return bool(twice)

    def _service(self, source: _Source, now: float) -> list[Notice]:
        source.gaps.clear()
        if self.dialect.black_box:
            self._boxes(source, now)
        return self._log(source)

    def _boxes(self, source: _Source, now: float) -> None:
        remote = self.remotes[source.node.name]
        if not source.run_dir:
            if now - source.asked_s < _RUN_DIR_AGAIN_S:
                return
            source.asked_s = now
            where = rundir.find(remote, source.service, self.deployment.service)
            if where.value is None:
                source.gaps.append(where.reason)
                return
            source.run_dir = where.value
        if remote.local:
            source.last = boxes.look(source.run_dir, source.node.name)
        else:
            reading = boxes.copy(remote, source.run_dir, deadline_s=_DEADLINE_S, full=False)
            if reading.value is None:
                # What an unreachable node last showed stays: its silence is a gap in the looking, not a server's end.
                source.gaps.append(reading.reason)
                return
            source.last = reading.value
        source.gaps.extend(source.last.unreadable)

    def _log(self, source: _Source) -> list[Notice]:
        remote = self.remotes[source.node.name]
        if source.service.log == "journal":
            source.journal = source.journal or journal.follow(source.service.unit, remote)
            reading = source.journal.poll()
            entries = reading.value or []
        else:
            source.log = source.log or logfile.Follower(source.service.log, remote)
            lines = source.log.poll()
            reading = Reading([Entry(text, 0) for text in lines.value] if lines.value is not None else None, lines.reason)
            entries = reading.value or []
        if reading.reason:
            source.gaps.append(reading.reason)
        read = batchlog.read(entries, self.dialect, "log")
        if read.batches:
            source.last_batch = read.batches[-1]
            source.seen += sum(1 for line in read.batches if line.progress)
        was_first, source.first = source.first, source.first and not entries
        # The lines of before the monitor's own start tell of the past: they raise nothing.
        return [] if was_first else list(read.notices)

    def _metrics(self, now: float) -> None:
        if self._page is not None and self._page.done():
            reading, self._page = self._page.result(), None
            self._page_gap = reading.reason
            if "refused" in reading.reason:  # nobody listens: the last gauges are those of a server that is no more
                self._values = None
                for source in self._sources:
                    source.last_batch = None
            if reading.value is not None:
                self._values = metrics.parse(reading.value.decode(errors="replace"))
        if self._page is None and now - self._page_s >= _METRICS_EVERY_S:
            self._page_s = now
            headers = auth_headers(self.deployment)
            self._page = self._pool.submit(metrics.fetch, f"{self.deployment.api}/metrics", deadline_s=_DEADLINE_S, headers=headers)

    def close(self) -> None:
        for source in self._sources:
            if source.journal:
                source.journal.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for remote in self.remotes.values():
            remote.close()


def _is_end(notice: Notice) -> bool:
    """Whether a line tells of an end that nobody ordered."""
    return notice.kind == "restart" or (notice.kind == "exit" and not notice.fields.get("status", "").startswith(_ORDERED))
