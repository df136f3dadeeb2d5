"""The life of one embedded service as a state machine: start, ready, exit, back-off, stop, all of the tree gone.

It never waits. The supervisor's loop calls ``exited`` and ``tick``, sleeps no longer than ``next_due``, and calls
``data`` of a selector key when its descriptor is readable.
"""

from __future__ import annotations

import os
import selectors
import signal
import uuid
from collections.abc import Callable, Mapping
from subprocess import Popen

from opsctl.service import child
from opsctl.service.definition import Definition
from opsctl.service.log import ServiceLog
from opsctl.service.manager import State
from opsctl.service.notify import NotifySocket
from opsctl.service.record import OverrideRecord, ServiceRecord

STEADY_S = 60.0  # a start that lived this long resets the back-off
LEFTOVERS_S = 10.0  # how long killed processes may take to vanish before the next start goes ahead


class Unit:
    """``plan`` gives the definition and the command line of the next start; ``save`` writes ``record`` down;
    ``spare`` names children of the supervisor that are not the service's."""

    def __init__(
        self, record: ServiceRecord, log: ServiceLog, selector: selectors.BaseSelector, inherited: Mapping[str, str],
        plan: Callable[[], tuple[Definition, OverrideRecord]], save: Callable[[], None],
        spare: Callable[[], frozenset[int]], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.record = record
        self.log = log
        self._selector = selector
        self._inherited = inherited
        self._plan = plan
        self._save = save
        self._spare = spare
        self._clock = clock
        self._service, _ = plan()
        self._want_up = False
        self._stopping = False
        self._failures = 0
        self._process: Popen[bytes] | None = None
        self._notify: NotifySocket | None = None
        self._outputs: dict[int, str] = {}
        self._start_by = self._stop_by = self._restart_at = self._watchdog_by = self._vanish_by = 0.0

    # Wishes.

    def start(self) -> None:
        """Run, unless it runs. A service that is being stopped starts when it has stopped; one that waits to be
        restarted starts now."""
        self._want_up = True
        self.record.restarts = self._failures = 0
        if not self.record.main_pid and not self._vanish_by:
            self._spawn()

    def stop(self, by: str = "") -> None:
        """``by``: the rollout whose dead-man wants it. What stops is written down before it can be seen to."""
        self._want_up = False
        if self.record.main_pid and not self._stopping:
            self._stopping = True
            self.record.ordered, self.record.ordered_by = self.record.invocation_id, by
            self._say("Stopping.")
            self._stop_by = self._clock() + self._service.stop_s
            self._start_by = self._watchdog_by = 0.0
            self.record.state = State.deactivating
            self._save()
            child.kill([self.record.main_pid], signal.SIGTERM)
        elif self._restart_at:
            self._restart_at = 0.0
            self.record.state, self.record.waiting_to_restart = State.inactive, False
            self._say("Stopped while it was waiting to be restarted.")
        self._save()

    @property
    def settled(self) -> bool:
        return self.record.state in (State.inactive, State.failed)

    # A start.

    def _spawn(self) -> None:
        self._service, command = self._plan()
        now, record, invocation = self._clock(), self.record, uuid.uuid4().hex
        self._restart_at, self._stopping = 0.0, False
        record.invocation_id, record.state, record.since_mono, record.ready_mono = invocation, State.activating, now, 0.0
        record.waiting_to_restart, record.result, record.status = False, "success", ""
        self._notify = NotifySocket(invocation)
        self._selector.register(self._notify.socket, selectors.EVENT_READ, self._hear)
        env = {**self._inherited, **command.env, "INVOCATION_ID": invocation, "NOTIFY_SOCKET": self._notify.address,
               "RUNTIME_DIRECTORY": self._service.run_dir}  # fmt: skip
        if self._service.watchdog_s:
            env["WATCHDOG_USEC"] = str(int(self._service.watchdog_s * 1e6))
            self._watchdog_by = now + self._service.watchdog_s
        output = self._open_output(invocation)
        try:
            self._process = child.spawn(child.overlaid(command.argv, command.mounts), env, self._service.cwd, output)
        except OSError as error:
            self._say(f"Cannot start {command.argv[0]}: {error}")
            record.result = "cannot-start"
            self._settle()
            return
        finally:
            os.close(output)
        record.main_pid = record.leader = self._process.pid
        found = child.stat(self._process.pid)
        record.leader_started = found.started if found else 0
        self._start_by = now + self._service.start_s
        self._say(f"Started {record.name}: main process {record.main_pid}, invocation {invocation}.")
        if not self._service.notify:
            record.state, self._start_by = State.active, 0.0
        self._save()

    def _open_output(self, invocation: str) -> int:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_end, False)
        self._outputs[read_end] = invocation
        self._selector.register(read_end, selectors.EVENT_READ, lambda: self._copy(read_end))
        return write_end

    def _copy(self, descriptor: int) -> None:
        invocation = self._outputs[descriptor]
        while True:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self._selector.unregister(descriptor)
                os.close(descriptor)
                del self._outputs[descriptor]
                self.log.end(invocation)
                break
            self.log.output(invocation, data)
        if self.log.moved:
            self._save()

    def _hear(self) -> None:
        now = self._clock()
        for notice in self._notify.receive() if self._notify else ():
            if notice.ready and self.record.state is State.activating:
                self.record.state, self.record.ready_mono, self._start_by = State.active, now, 0.0
                self._say("Ready.")
                self._save()
            if notice.extend_s and self._start_by:
                self._start_by = max(self._start_by, now + notice.extend_s)
            if notice.extend_s and self._stop_by:
                self._stop_by = max(self._stop_by, now + notice.extend_s)
            if notice.watchdog and self._watchdog_by:
                self._watchdog_by = now + self._service.watchdog_s
            self.record.status = notice.status or self.record.status

    # An end.

    def exited(self, pid: int, code: int) -> None:
        """A child was reaped; ``code`` is negative for a signal."""
        record = self.record
        if pid != record.main_pid:
            return
        for descriptor in [d for d, invocation in self._outputs.items() if invocation == record.invocation_id]:
            self._copy(descriptor)
        how = f"code=killed, status={-code}/{signal.Signals(-code).name[3:]}" if code < 0 else f"code=exited, status={code}"
        self._say(f"Main process exited, {how}")  # systemd's words, which log readers know
        if self._process is not None:
            self._process.returncode = code
        if record.result == "success" and code and not self._stopping:
            record.result = "signal" if code < 0 else "exit-code"
        record.main_pid, record.state = 0, State.deactivating
        self._start_by = self._stop_by = self._watchdog_by = 0.0
        self._vanish_by = self._clock() + LEFTOVERS_S
        self._save()

    def _settle(self) -> None:
        """Nothing of the start is left. What now?"""
        record, now = self.record, self._clock()
        record.main_pid = record.leader = 0
        self._vanish_by = self._watchdog_by = 0.0
        if self._notify is not None:
            self._selector.unregister(self._notify.socket)
            self._notify.close()
            self._notify = None
        failed = record.result != "success"
        short = now - record.since_mono < STEADY_S
        self._failures = (self._failures if short else 0) + 1 if failed else 0
        if self._stopping:
            record.state = State.inactive
            self._say("Stopped.")
            if self._want_up:
                self._spawn()
        elif failed and self._want_up and self._service.restart:
            wait = min(self._service.restart_s * 2 ** min(self._failures - 1, 16), self._service.restart_max_s)
            record.state, record.waiting_to_restart = State.activating, True
            self._restart_at = now + wait
            self._say(f"Failed with result '{record.result}'. Restarting in {wait:g} s.")
        else:
            self._want_up = False
            record.state = State.failed if failed else State.inactive
            self._say(f"Ended with result '{record.result}'.")
        self._save()

    # Time.

    def next_due(self) -> float:
        """When ``tick`` is next needed, on the clock; infinity when nothing is due."""
        if self._vanish_by:
            return self._clock() + 0.01
        due = [at for at in (self._start_by, self._stop_by, self._restart_at, self._watchdog_by) if at]
        return min(due, default=float("inf"))

    def tick(self) -> None:
        now = self._clock()
        if self._vanish_by:
            left = child.descendants(os.getpid(), self._spare())
            child.kill(left)
            if left and now >= self._vanish_by:
                self._say(f"Processes {left} do not end, SIGKILL or not; going on without them.")
                left = []
            if not left:
                self._settle()
        elif self._restart_at and now >= self._restart_at:
            self.record.restarts += 1
            self._say(f"Scheduled restart job, restart counter is at {self.record.restarts}.")
            self._spawn()
        elif self._start_by and now >= self._start_by:
            self._end("timeout", "Not ready in time; killing it.")
        elif self._watchdog_by and now >= self._watchdog_by:
            self._end("watchdog", f"No WATCHDOG=1 for {self._service.watchdog_s:g} s; killing it.")
        elif self._stop_by and now >= self._stop_by:
            self._end("timeout", f"Did not stop within {self._service.stop_s:g} s of SIGTERM; killing it.")

    def _end(self, result: str, text: str) -> None:
        self._say(text)
        self.record.result = result
        self._start_by = self._watchdog_by = self._stop_by = 0.0
        child.kill([self.record.main_pid])

    def _say(self, text: str) -> None:
        self.log.say(self.record.invocation_id, text)
