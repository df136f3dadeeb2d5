"""The parent process: starts the API process and the ranks, says READY, watches, and ends everything in order.

It holds no tensor and shares no lock with a rank, so nothing that happens in a rank can stop it. What it knows of
ranks it reads from their black boxes.

Ends::

    SIGTERM, SIGINT      the API process drains and ends, then the ranks; exit 0. A rank that stands still cannot
                         drain: then stacks are saved, all are killed; exit 1. Before READY all are killed at once; exit 0
    a second SIGINT      the drain is broken off, clients are told; exit 130
    a process dies       clients are told, stacks of the others are saved, all are killed; exit 1
    a rank is stuck      stacks and black boxes are saved, all are killed; exit 1   (--watchdog-timeout)
    held work lies       the same                                                   (--watchdog-timeout)
    a setting is no good found by a child before READY, which says which; all are killed; exit 2
    not ready in time    the same                                                   (--boot-timeout)
    another node is lost the same, exit 75 so that a service manager starts this node again
    another node ends    node 0 drains, exit 75; node 0 ending ends the others, exit 75
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from engine import blackbox, faults, keys
from engine.config import Settings, run_directory
from engine.launch import evidence, relay, telling
from engine.launch.children import Child, Family, base_environment, rank_environment
from engine.launch.notify import Notifier
from engine.launch.rundir import RunDirectory
from engine.launch.watchdog import Lying, stuck_rank, unfresh
from engine.server.listener import listen

_log = logging.getLogger("engine.launcher")
_TICK_S = 0.1
_STACKS_S = 10.0
_STOP_S = 15.0
_SAY_S = 5.0
_HURRIED_S = 1.0
_ONE_PRESS_S = 0.5  # a wrapper may pass on the SIGINT that the terminal has sent to everybody
_LAST_WORDS_S = 6.0  # a little more than the API process takes at most to tell its clients
_EXTEND_S = 30.0
_STILL_S = 8.0
USAGE = 2
INTERRUPTED = 130
PEER_ENDED = 75  # EX_TEMPFAIL: nothing is wrong here, start me again


@dataclass(frozen=True)
class End:
    """Why the launcher ends. ``keep``: take evidence first. ``drain``: let running requests finish."""

    code: int
    why: str
    keep: bool = False
    drain: bool = False


class Launcher:
    """One node's server.

    ``model``: the folder, for which ``preflight.check`` has found the settings good.

    Raises (from the constructor):
        ConfigError: the run directory is in use.
    """

    def __init__(self, settings: Settings, model: Path, env: Mapping[str, str]) -> None:
        self._settings = settings
        self._threads = settings.parallel.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // len(settings.local_ranks))
        self._model = model
        self._keys = keys.take(env)
        self._env = env
        self._notifier = Notifier(env)
        self._invocation = env.get("INVOCATION_ID") or uuid.uuid4().hex
        self._place = RunDirectory(run_directory(settings, env).absolute())
        self._run_dir = self._place.path
        self._family = Family()
        self._stop_signal = 0
        self._asked_s = 0.0
        self._hurried = False
        self._link: relay.Hub | relay.Spoke | None = None
        self._told_s = 0.0
        self._booted = False

    def run(self) -> int:
        """Serve until something ends it; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            if (refusal := self._cannot_listen()) is not None:
                _log.error("%s", refusal)
                return 1
            self._start()
            end = self._boot() or self._watch()
            return self._finish(end)
        finally:
            self._family.kill_all()
            if self._link is not None:
                self._link.close()
            self._place.close()

    # Starting.

    def _cannot_listen(self) -> str | None:
        """Why nobody could listen where clients are to come: better known before a model is loaded than after. No matter
        of exit code 2: it may be different in a moment."""
        server = self._settings.server
        if self._settings.parallel.node_rank > 0 or server.port == 0:
            return None
        try:
            listen(server.host, server.port).close()
        except OSError as error:
            return f"--host {server.host} --port {server.port}: cannot listen: {error}"
        return None

    def _start(self) -> None:
        settings = self._settings
        ranks = ", ".join(map(str, settings.local_ranks))
        _log.info("Starting rank %s with %s, configuration %s", ranks, self._model.name, settings.digest[:12])
        env = base_environment(settings, self._model, self._place.sockets, self._run_dir, self._invocation, self._env)
        if settings.parallel.nnodes > 1:
            if not settings.parallel.group_token_file and not _is_local(settings.parallel.dist_init_addr):
                _log.warning("no --group-token-file: whoever reaches the four ports from --dist-init-addr can disturb this group")
            kind = relay.Hub if settings.parallel.node_rank == 0 else relay.Spoke
            self._link = kind(settings, self._run_dir, uuid.uuid4().hex)
        if settings.parallel.node_rank == 0:
            handed = keys.hand_over(self._keys)
            self._family.spawn("API process", "engine.server.main", {**env, "LASTBATCH_KEYS_FD": str(handed)}, handed=handed)
            self._keys = {}
        for rank in settings.local_ranks:
            its = faults.settings_of(rank, settings) if settings.launch.enable_faults else settings
            self._family.spawn(f"rank {rank}", "engine.scheduler.process", rank_environment(its, rank, env, self._threads), rank)
        self._describe()

    def _boot(self) -> End | None:
        """Wait until everything is ready; None when it is."""
        begun = said = time.monotonic()
        until = begun + self._settings.launch.boot_timeout_s
        extended = 0.0
        while not (self._family.ready and self._all_seen() and self._node_0_ready()):
            end = self._ended()
            if end is not None:
                return end
            now = time.monotonic()
            if now > until:
                return End(1, f"not ready after {self._settings.launch.boot_timeout_s:g} s (--boot-timeout)", keep=True)
            if now - extended > _EXTEND_S / 3:
                extended = now
                self._notifier.send(f"EXTEND_TIMEOUT_USEC={int(_EXTEND_S * 1e6)}", "STATUS=loading")
            if now - said > _SAY_S:
                said = now
                _log.info("Starting for %.0f s: %s", now - begun, telling.awaited(self._family, self._boxes()))
            time.sleep(_TICK_S)
        self._booted = True
        if isinstance(self._link, relay.Hub):
            self._link.ready = True
        self._describe()
        self._notifier.send("READY=1", f"STATUS=serving, configuration {self._settings.digest[:12]}")
        served = telling.served(self._settings, self._model, self._family, self._threads)
        _log.info("Ready: configuration %s, invocation %s%s, run directory %s", self._settings.digest[:12], self._invocation[:8],
                  served, self._run_dir)  # fmt: skip
        return None

    def _all_seen(self) -> bool:
        """Every rank that this node answers for has a black box here: on node 0 those of the other nodes too."""
        wanted = range(self._settings.parallel.tp) if self._settings.parallel.node_rank == 0 else self._settings.local_ranks
        return set(wanted) <= set(self._boxes())

    def _node_0_ready(self) -> bool:
        """A rank of another node has nobody to answer to: it serves from when node 0 does. Said earlier, this node's
        watchdogs would count the loading and the wait for the others as standing still."""
        return self._link.ready if isinstance(self._link, relay.Spoke) else True

    # Serving.

    def _watch(self) -> End:
        launch = self._settings.launch
        lying = Lying()
        while True:
            end = self._ended()
            if end is not None:
                return end
            now = time.monotonic_ns()
            boxes = self._boxes()
            if launch.watchdog_timeout_s:
                stuck = stuck_rank(boxes, now, launch.watchdog_timeout_s)
                if stuck is not None:
                    return End(1, f"rank {stuck.rank} has not moved for {stuck.still_s:.0f} s (phase {stuck.phase.name}; "
                                  f"--watchdog-timeout {launch.watchdog_timeout_s:g})", keep=True)  # fmt: skip
                lying = lying.look(boxes, now)
                if lying.lain_s > launch.watchdog_timeout_s:
                    return End(1, f"rank 0 has not moved for {lying.lain_s:.0f} s any request that it holds ("
                                  f"--watchdog-timeout {launch.watchdog_timeout_s:g})", keep=True)  # fmt: skip
            self._tell_manager(boxes, now)
            time.sleep(_TICK_S)

    def _tell_manager(self, boxes: Mapping[int, blackbox.Snapshot], now_ns: int) -> None:
        every = self._notifier.watchdog_s
        if every is None or time.monotonic() - self._told_s < every / 4:
            return
        if len(boxes) >= len(self._settings.local_ranks) and not unfresh(boxes, now_ns, self._settings.server.health_max_age_s):
            self._told_s = time.monotonic()
            self._notifier.send("WATCHDOG=1")

    def _ended(self) -> End | None:
        if self._stop_signal:
            return End(0, f"{signal.Signals(self._stop_signal).name}", drain=True)
        dead = self._family.dead()
        if dead is not None and dead.process.returncode == 0 and self._settings.parallel.node_rank > 0:
            return End(PEER_ENDED, f"node 0 is ending ({dead.name} was told to stop)")
        if dead is not None and dead.process.returncode == USAGE and not self._booted:
            return End(USAGE, f"{dead.name} cannot use a setting; its last line says which")
        if dead is not None:
            return End(1, f"{dead.name} (pid {dead.pid}) ended with {telling.ending(dead)}", keep=True)
        if self._link is not None:
            peer = self._link.turn()
            if peer is not None:
                return End(PEER_ENDED, peer.why, keep=not peer.announced, drain=peer.announced and self._settings.parallel.node_rank == 0)
        return None

    def _boxes(self) -> dict[int, blackbox.Snapshot]:
        found = {}
        for path in (*self._run_dir.glob("rank-*.box"), *self._run_dir.glob("remote-rank-*.box")):
            with contextlib.suppress(blackbox.BoxError):
                box = blackbox.read(path, events=False)
                found[box.header.rank] = box
        return found

    # Ending.

    def _finish(self, end: End) -> int:
        drains = end.drain and self._booted and self._stop_signal == signal.SIGINT
        more = f"; requests in flight get at most {self._settings.server.drain_timeout_s:g} s; Ctrl-C again ends now" if drains else ""
        _log.log(logging.INFO if end.code == 0 else logging.ERROR, "Ending: %s%s", end.why, more)
        self._notifier.send("STOPPING=1", f"STATUS={end.why}")
        if not end.drain or not self._booted:  # before READY nobody is served
            self._break_off(end.why, keep=end.keep)
            return end.code
        late = [] if self._still() else self._drain()
        if self._hurried:
            self._break_off("Ctrl-C again", keep=False)
            return INTERRUPTED
        if self._still():
            ranks = ", ".join(map(str, self._still()))
            why = f"rank {ranks} has not moved for {_STILL_S:g} s: there is nothing to wait for"
            _log.error("%s", why)
            self._break_off(why, keep=True)
            return 1
        for child in late:
            how = "is stopped (state T)" if child.is_stopped else "did not end in time"
            _log.error("%s (pid %d) %s and is killed", child.name, child.pid, how)
        failed = [child for child in self._family.children if child not in late and child.process.returncode]
        for child in failed:
            _log.error("%s (pid %d) ended with %s", child.name, child.pid, telling.ending(child))
        return 1 if late or failed else end.code

    def _break_off(self, why: str, *, keep: bool) -> None:
        """Nothing that runs will be finished: clients are told first, for evidence takes its time."""
        api = [child for child in self._family.children if child.rank is None]
        for child in api if self._booted else ():
            child.tell(why)
        if keep:
            self._keep_evidence()
        if self._link is not None:
            self._link.end()
        if self._booted:
            self._family.wait(api, _HURRIED_S if self._hurried else _LAST_WORDS_S)

    def _drain(self) -> list[Child]:
        """End in order, so that no answer is cut off; returns who did not end in time.

        The ranks of another node work for requests of node 0 until it has drained, which this node's wish to end makes
        it do; then it tells all ranks to stop.
        """
        api = [child for child in self._family.children if child.rank is None]
        ranks = [child for child in self._family.children if child.rank is not None]
        limit_s = self._settings.server.drain_timeout_s + _STOP_S
        if isinstance(self._link, relay.Spoke):
            self._link.end()
            until = time.monotonic() + limit_s
            while any(child.process.poll() is None for child in ranks) and self._link.turn() is None and time.monotonic() < until:
                if self._hurried:
                    return []
                time.sleep(_TICK_S)
        late = self._stop(api, limit_s)
        if self._hurried or self._still():
            return late
        late += self._stop(ranks, _STOP_S)
        if isinstance(self._link, relay.Hub):
            self._link.end()
        return late

    def _stop(self, children: list[Child], deadline_s: float) -> list[Child]:
        for child in children:
            child.stop()
        return self._family.wait(children, deadline_s, lambda: self._hurried or bool(self._still()))

    def _still(self) -> list[int]:
        """Ranks of this node that live and stand still: requests that they hold will not end. (Copies of other nodes' boxes
        age while this one drains. A rank there that stands still holds up those here.)"""
        alive = {child.rank for child in self._family.children if child.process.poll() is None}
        return [rank for rank in unfresh(self._boxes(), time.monotonic_ns(), _STILL_S) if rank in alive]

    def _keep_evidence(self) -> None:
        folder = self._run_dir / time.strftime("evidence-%Y%m%dT%H%M%SZ", time.gmtime())
        alive = {child.rank: child.pid for child in self._family.children if child.rank is not None and child.process.poll() is None}
        boxes = {rank: self._run_dir / f"rank-{rank}.box" for rank in self._settings.local_ranks}
        missing = evidence.save(folder, alive, boxes, limit_s=_STACKS_S)
        _log.error("Evidence is in %s%s", folder, f"; missing: {'; '.join(missing)}" if missing else "")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._stop_signal:
            self._stop_signal, self._asked_s = number, now
        elif number == signal.SIGINT and now - self._asked_s > _ONE_PRESS_S:
            self._hurried = True

    def _describe(self) -> None:
        """``launcher.json``: who is who, for monitors and for people."""
        described = telling.described(self._settings, self._family, self._invocation, self._run_dir, ready=self._booted)
        scratch = self._run_dir / ".launcher.json"
        scratch.write_text(json.dumps(described, indent=1) + "\n")
        scratch.rename(self._run_dir / "launcher.json")


def _is_local(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or host.startswith("127.") or host == "::1"
