"""Look at a deployment once: black boxes, log lines, metrics, from all its nodes, as one sample and its gaps.

The look itself must never wait for a wedged server: metrics are fetched in the background and count when they come.
"""

from __future__ import annotations

import concurrent.futures
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from monitors import engines
from monitors.capture.bundle import auth_headers
from monitors.fleet import Deployment, Node, Service
from monitors.judge.ending import Ending
from monitors.judge.holding import Holding
from monitors.judge.markup import Markup
from monitors.judge.power import Bands, Load
from monitors.judge.progress import Sample, Signs, Source, from_boxes, from_signals
from monitors.judge.scene import BatchLine, Health, Notice, Process
from monitors.judge.slots import Slots
from monitors.observe import batchlog, boxes, journal, logfile, metrics, probe, rundir, stdin
from monitors.observe.batchlog import Entry
from monitors.observe.devices import Devices
from monitors.observe.kin import Kin
from monitors.observe.reading import Reading
from monitors.remote import Asked, Remote
from monitors.standing import Standing

_METRICS_EVERY_S = 2.0
_RUN_DIR_AGAIN_S = 10.0
_DEADLINE_S = 5.0
_IN_DOUBT_S = 2.0
_PROBE_AFTER_S = 15.0
_PROBE_EVERY_S = 20.0
_PROBE_DEADLINE_S = 15.0
_BLIND_S = 20.0
_BLIND = "the server answers, and no folder of black boxes is where it is looked for: counters and log lines speak for it"
_GONE = frozenset({"gone", "Z", "X"})


@dataclass(frozen=True)
class Look:
    """``boxes`` by rank, without events; ``gaps`` says what could not be read, one line each; ``load`` is all that the
    server did since the last look, None when that is mixed or not known; ``errors`` are the engine's own counters of them
    that have grown since the last look, and by how much; ``slots`` says which slots leak and ``markup`` how many answers held
    markup, empty for none; ``orphans`` are ranks of an earlier start that live on; ``ending`` is how the server ends, by its log."""

    sample: Sample
    boxes: Mapping[int, boxes.Box]
    gaps: tuple[str, ...]
    notices: tuple[Notice, ...] = ()
    load: Load | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    slots: str = ""
    markup: str = ""
    orphans: tuple[Process, ...] = ()
    ending: Ending = field(default_factory=Ending)


@dataclass
class _Source:
    """What is kept for one service between two looks."""

    node: Node
    service: Service
    run_dir: str = ""
    asked_s: float = -1e9
    last: boxes.NodeBoxes | None = None
    log: logfile.Follower | stdin.Piped | None = None
    journal: journal.Journal | None = None
    first: bool = True
    seen: int = 0  # batch lines with progress
    kinds: Counter[str] = field(default_factory=Counter)
    last_batch: BatchLine | None = None
    slots: Slots = field(default_factory=Slots)
    ending: Ending = field(default_factory=Ending)
    standing: Standing | None = None  # on another node
    gaps: list[str] = field(default_factory=list)

    @property
    def folderless(self) -> bool:
        """Whether there is no folder to look for black boxes in, by the last look."""
        return not self.run_dir or (self.last is not None and not self.last.exists)

    def asked(self, remote: Remote) -> Asked:
        """Through what its node is asked at every look."""
        if remote.local:
            return remote
        self.standing = self.standing or Standing(remote)
        return self.standing


class Lookout:
    """Follows one deployment. ``close`` ends what it started on nodes."""

    def __init__(self, deployment: Deployment, clock: Callable[[], float] = time.monotonic, bands: Bands | None = None) -> None:
        self.deployment = deployment
        self.dialect = engines.load(deployment.engine)
        self.remotes = {node.name: Remote(node) for node in deployment.node}
        self._clock = clock
        self._sources = [_Source(node, service) for node in deployment.node for service in node.service]
        # A place for whatever may hang at once: metrics, probe, process table and each node's GPUs, beside every source.
        places = len(self._sources) + 2 + 2 * len(self.remotes)
        self._pool = concurrent.futures.ThreadPoolExecutor(places, thread_name_prefix="look")
        self.devices = Devices(self.remotes, self._pool, bands or Bands())
        self._holding = Holding()
        self._errors: dict[str, float] = {}
        self._markup = Markup()
        self._kin = Kin(self.remotes, self.dialect, self._pool)
        self._quiet_s = 0.0
        self._probe: concurrent.futures.Future[Health] | None = None
        self._probe_s = -1e9
        self._rests_at = -1  # up to so many batch lines the server has been seen to rest
        self._batches = (0, 0)  # prefills and decodes counted so far
        self._compiling = False  # the log's last word on it, until a batch line
        self._loading = False
        self._page: concurrent.futures.Future[Reading[dict[str, float]]] | None = None
        self._page_s = -1e9
        self._values: dict[str, float] | None = None
        self._page_gap = ""
        self._invocation = ""
        self._seeing_s = clock()  # when black boxes were last where they are looked for, or nobody answered
        self._gone: frozenset[tuple[int, int]] = frozenset()

    def look(self, *, quiet_s: float = 0.0) -> Look:
        """``quiet_s``: how long held work has lain by the last look. In doubt devices are asked more often, and a server
        that only its log speaks for is asked for a token."""
        now = self._clock()
        self._quiet_s = quiet_s
        self._metrics(now)
        self.devices.turn(now, in_doubt=quiet_s >= _IN_DOUBT_S)
        jobs = [self._pool.submit(self._service, source, now) for source in self._sources]
        told = [job.result() for job in jobs]
        notices = tuple(notice for one in told for notice in one)
        found = {box.rank: box for source in self._sources if source.last for box in source.last.boxes}
        dead = self._kin.dead(now)
        fell = any(source.ending.tells(notice) for source, one in zip(self._sources, told, strict=True) for notice in one)
        ended = self._ended(found) or fell or bool(dead)
        gaps = [gap for source in self._sources for gap in source.gaps]
        gaps += self.devices.gaps
        blind = self.dialect.black_box and self._is_blind(now)
        gaps += [_BLIND] if blind else []
        # Where black boxes say what is held, no gauge is asked.
        gaps += [text for text in (self._page_gap, "" if self.dialect.black_box else self._holding.complaint) if text]
        self._told(notices)
        if ended and not found:  # what counters and log last said is about a server that is no more
            self._values, self._holding = None, Holding()
            for source in self._sources:
                source.last_batch = None
        sample = self._sample(now, found, ended, blind=blind)
        errors, self._errors = self._errors, {}
        slots = next((text for source in self._sources if (text := source.slots.stuck(now))), "")
        return Look(sample, found, tuple(gaps), notices, self._load(sample, found), errors, slots, self._markup.told(), self._kin.orphans,
                    self._ending())  # fmt: skip

    def _ending(self) -> Ending:
        """An order first: the services of a group go down together, and some of them only because the others do."""
        endings = [source.ending for source in self._sources]
        return min(endings, key=lambda one: (one.order is None, not one.cause), default=Ending())

    def _sample(self, now: float, found: Mapping[int, boxes.Box], ended: bool, *, blind: bool) -> Sample:
        lines = sum(source.seen for source in self._sources)
        spinning, working = self.devices.signs(now)
        if found:
            answered = all(source.last is not None for source in self._sources)
            snapshots = {rank: box.snapshot for rank, box in found.items()}
            ready = all((source.last.launcher or {}).get("ready", True) for source in self._sources if source.last)
            sample = from_boxes(now, snapshots, ended=ended, all_answered=answered, ready=ready)
            self._invocation = sample.invocation
            return replace(sample, signs=replace(sample.signs, spinning=spinning, working=working))
        if self.dialect.black_box and not blind:
            # No rank runs. What the log and the counters last said is about a server that is no more.
            return Sample(now, None, None, self._invocation, ended=ended)
        values = self._values or {}
        last = [source.last_batch for source in self._sources if source.last_batch]
        said = sum(line.running + line.waiting for line in last) if last else None
        if self._holding.held() is None and self.dialect.metrics.lag_s and said and not spinning:
            said = self._asked(said, lines, now)
        held = self._holding.held(line=said)
        signs = Signs(spinning=spinning, working=working, computing=self._compiling and not spinning)
        source = Source.steps if metrics.by_steps(values, self.dialect) else Source.lines
        return from_signals(now, held=held, work=(metrics.progress(values, self.dialect), lines), ended=ended, loading=self._loading,
                            source=source, signs=signs, lag_s=self.dialect.metrics.lag_s if self._values else 0.0)  # fmt: skip

    def _is_blind(self, now: float) -> bool:
        """Whether black boxes are looked for in the wrong place: their folders have not been there for a while, and the server
        answers all the same. Then counters and log lines speak for it, as for an engine that writes none."""
        if self._values is None or any(not source.folderless for source in self._sources):
            self._seeing_s = now
        return now - self._seeing_s >= _BLIND_S

    def _asked(self, said: float, lines: int, now: float) -> float:
        """Requests held, where only the last batch line speaks and the engine writes none when it comes to rest: in
        doubt the server is asked for one token, which it gives when nothing is stuck."""
        if self._probe is not None and self._probe.done():
            answer, self._probe = self._probe.result(), None
            self._rests_at = lines if answer.status == 200 else -1
        if self._quiet_s >= _PROBE_AFTER_S and self._probe is None and lines > self._rests_at and now - self._probe_s >= _PROBE_EVERY_S:
            self._probe_s = now
            route = self.dialect.health.get("generate", "/health")
            headers = auth_headers(self.deployment)
            self._probe = self._pool.submit(probe.ask, self.deployment.api, route, deadline_s=_PROBE_DEADLINE_S, headers=headers)
        return 0.0 if lines <= self._rests_at else said

    def _load(self, sample: Sample, found: Mapping[int, boxes.Box]) -> Load | None:
        """By the kinds of batches that were counted or logged since the last look."""
        if found:
            counters = [box.snapshot.host.counters for box in found.values() if box.snapshot.header.tp == 0]
            prefills = sum(one["batches_prefill"] for one in counters)
            decodes = sum(one["batches_decode"] + one["batches_verify"] for one in counters)
        else:
            prefills = sum(source.kinds["Prefill"] for source in self._sources)
            decodes = sum(source.kinds["Decode"] for source in self._sources)
        before, self._batches = self._batches, (prefills, decodes)
        grew = (prefills > before[0], decodes > before[1])
        return {(True, False): Load.prefill, (False, True): Load.decode, (False, False): Load.idle if sample.held == 0 else None}.get(grew)

    def _told(self, notices: tuple[Notice, ...]) -> None:
        """What the log says that the engine is about. A batch line ends both (``_log`` sees to that)."""
        for notice in notices:
            if notice.kind == "loading":
                self._loading = True
            elif notice.kind == "ready":
                self._loading = self._compiling = False
            elif notice.kind == "compiling":
                self._compiling = True

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
            reading = boxes.copy(source.asked(remote), source.run_dir, deadline_s=_DEADLINE_S, full=False)
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
            if source.log is None:
                piped = source.service.log == "-"
                source.log = stdin.Piped(sys.stdin.buffer) if piped else logfile.Follower(source.service.log, source.asked(remote))
            lines = source.log.poll()
            found = [Entry(text, number) for number, text in enumerate(lines.value, 1)] if lines.value is not None else None
            reading = Reading(found, lines.reason)
            entries = reading.value or []
        if reading.reason:
            source.gaps.append(reading.reason)
        read = batchlog.read(entries, self.dialect, "log")
        source.ending = source.ending.take(read)
        if read.batches:
            source.last_batch = read.batches[-1]
            source.seen += sum(1 for line in read.batches if line.progress)
            for line in read.batches:
                source.slots = source.slots.take(line, self._clock())
            source.kinds.update(line.kind for line in read.batches if line.progress)
            self._loading = self._compiling = False
        was_first, source.first = source.first, source.first and not entries
        # The lines of before the monitor's own start tell of the past: they raise nothing.
        return [] if was_first else list(read.notices)

    def _metrics(self, now: float) -> None:
        if self._page is not None and self._page.done():
            reading, self._page = self._page.result(), None
            self._page_gap = reading.reason
            if "refused" in reading.reason:  # nobody listens: the last gauges are those of a server that is no more
                self._values, self._holding = None, Holding()
                for source in self._sources:
                    source.last_batch = None
            if reading.value is not None:
                before, self._values = self._values or {}, reading.value
                self._errors = metrics.grown(before, self._values, self.dialect)
                counted = (metrics.total(self._values, names) for names in (self.dialect.metrics.leaks, self.dialect.metrics.answered))
                self._markup = self._markup.take(now, *counted)
                self._holding = self._holding.take(metrics.page(self._values, self.dialect))
        if self._page is None and now - self._page_s >= _METRICS_EVERY_S:
            self._page_s = now
            headers = auth_headers(self.deployment)
            self._page = self._pool.submit(metrics.scrape, self.deployment.api, self.dialect, deadline_s=_DEADLINE_S, headers=headers)

    def close(self) -> None:
        for source in self._sources:
            if source.standing:
                source.standing.close()
            if source.journal:
                source.journal.close()
        self.devices.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for remote in self.remotes.values():
            remote.close()
