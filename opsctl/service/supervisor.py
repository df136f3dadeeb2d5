"""The embedded supervisor: one process, one thread, one loop, keeping one service running.

It is also the dead-man of a rollout: a trial whose lease ends without renewal is removed and the service restarted as
it was committed, whatever became of the operator.

What it cannot do is act after its own SIGKILL. Then the service is told to stop (parent-death signal), clients see
the state ``failed`` with result ``supervisor-died``, and the next start ends whatever is left and drops a dead trial.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import msgspec

from opsctl.service import child, control, definition, record
from opsctl.service.log import ServiceLog
from opsctl.service.manager import LeaseLost, Locked, ServiceError
from opsctl.service.unit import LEFTOVERS_S, Unit

_HOOK_S = 900.0  # how long the command may take that pages after a revert, and puts back into its router what has booted again


class Supervisor:
    """Raises ServiceError when another supervisor has the service, or the last start's processes cannot be ended."""

    def __init__(self, folder: Path, name: str, env: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._name, self._env, self._clock = folder, name, env, clock
        service = definition.read(folder, name, env)
        self.paths = record.Folder(service, env)
        self.paths.private.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _take_lock(self.paths.lock, name)
        old = record.read(self.paths.state, record.ServiceRecord)
        self.record = record.ServiceRecord(name=name, supervisor_pid=os.getpid(), boot_id=_boot_id())
        if old is not None:
            self.record.spans = old.spans
            self.record.reverted_by_deadman, self.record.reverted_at_utc = old.reverted_by_deadman, old.reverted_at_utc
            self.record.ordered, self.record.ordered_by = old.ordered, old.ordered_by
        self._log = ServiceLog(Path(service.log), self.record.spans)
        self._hooks: dict[int, float] = {}
        self._ending = False
        self._selector = selectors.DefaultSelector()
        child.become_subreaper()
        if old is not None and old.leader and old.boot_id == self.record.boot_id:
            self._end_survivors(old)
        self.unit = Unit(self.record, self._log, self._selector, env, self._plan, self._save, lambda: frozenset(self._hooks), clock)
        self._lease = record.read(self.paths.lease, record.LeaseRecord)
        if old is not None and old.boot_id != self.record.boot_id:
            self._drop_trial()

    def run(self, *, start: bool, ready: Callable[[], None] = lambda: None) -> int:
        """Until told to end (SIGTERM, SIGINT or ``end`` on the socket). ``ready`` is called once it listens."""
        listener = control.listen(self.paths.control)
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._selector.register(listener, selectors.EVENT_READ, lambda: control.serve_one(listener, self._answer))
        self._selector.register(wake_read, selectors.EVENT_READ, lambda: _drain(wake_read))
        self._save()
        if start:
            self.unit.start()
        ready()
        while not (self._ending and self.unit.settled):
            for key, _ in self._selector.select(self._until_next()):
                key.data()
            self._reap()
            self._time()
        self._log.close()
        self._save()
        listener.close()
        self.paths.control.unlink(missing_ok=True)
        return 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._ending = True
            self.unit.stop()

    def _plan(self) -> tuple[definition.Definition, record.OverrideRecord]:
        """The definition as it is now, with the committed override over it and the trial over both."""
        service = definition.read(self._folder, self._name, self._env)
        return service, planned(service, self.paths)

    def _save(self) -> None:
        """A full disk must not take the service down: the record in memory stays right, and the next save tries again."""
        try:
            record.write(self.paths.state, self.record)
            self._log.moved = False
        except OSError as error:
            self._log.moved = True
            self._say(f"Cannot write {self.paths.state}: {error}")

    def _end_survivors(self, old: record.ServiceRecord) -> None:
        until = self._clock() + LEFTOVERS_S
        left = child.survivors(old.leader, old.leader_started, old.invocation_id)
        if left:
            self._log.say(old.invocation_id, f"The last supervisor died and left processes {left}; ending them.")
        while left and self._clock() < until:
            child.kill(left)
            time.sleep(0.01)
            left = child.survivors(old.leader, old.leader_started, old.invocation_id)
        if left:
            raise ServiceError(f"{self._name}: processes {left} of the last start cannot be ended; look at them with ps, then start again")

    # The loop.

    def _until_next(self) -> float:
        due = [self.unit.next_due(), *self._hooks.values(), *([self._lease.until_mono] if self._lease else [])]
        return min(5.0, max(0.0, min(due) - self._clock()))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._hooks.pop(pid, None)
            self.unit.exited(pid, os.waitstatus_to_exitcode(status))

    def _time(self) -> None:
        now = self._clock()
        if self._lease is not None and now >= self._lease.until_mono:
            self._lease_ended(self._lease)
        self.unit.tick()
        for pid, until in list(self._hooks.items()):
            if now >= until:
                child.kill([pid])
                self._hooks[pid] = now + 1.0

    # The control socket.

    def _answer(self, request: control.Request) -> control.Reply:
        try:
            return self._do(request)
        except (ServiceError, OSError) as error:
            kind = control.error_name(error) if isinstance(error, ServiceError) else "service"
            return control.Reply(error=kind, message=f"{self._name}: {error}")

    def _do(self, request: control.Request) -> control.Reply:
        match request.do:
            case "snapshot":
                return control.Reply(record=self.record)
            case "start":
                self.unit.start()
            case "stop":
                self._touch()
                self.unit.stop()
            case "end":
                if self._lease is not None:
                    raise Locked("a rollout is deciding about it; `opsctl rollout abort` first")
                self._ending = True
                self.unit.stop()
            case "arm" if request.lease is not None:
                self._arm(request.lease)
            case "renew":
                lease = self._held_by(request.token)
                self._arm(msgspec.structs.replace(lease, ttl_s=request.ttl_s))
            case "disarm":
                if self._lease is not None and self._lease.token == request.token:
                    self._forget_lease()
            case "lease":
                return control.Reply(token=self._lease.token if self._lease else "")
            case "trial" if request.override is not None:
                if self._lease is None:
                    raise LeaseLost("no lease is armed, so a trial would have no dead-man; arm first")
                self._touch()
                record.write(self.paths.trial, request.override)
            case "prepare":
                self._held_by(request.token)
                trial = record.read(self.paths.trial, record.OverrideRecord)
                if trial is not None:
                    record.write(self.paths.staged, trial)
            case "restore":
                if request.override is None:
                    record.remove(self.paths.committed)
                else:
                    record.write(self.paths.committed, request.override)
                record.remove(self.paths.trial)
            case "commit":
                self._commit_trial()
            case "revert":
                record.remove(self.paths.trial)
            case other:
                raise ServiceError(f"unknown request {other!r}; is opsctl newer than its running supervisor? restart the service")
        return control.Reply()

    # The dead-man.

    def _arm(self, lease: record.LeaseRecord) -> None:
        if self._lease is not None and self._lease.token != lease.token:
            left = self._lease.until_mono - self._clock()
            raise Locked(f"held by rollout {self._lease.token}, whose lease ends in {left:.0f} s unless it is renewed")
        touched = lease.touched or (self._lease is not None and self._lease.touched)
        self._lease = msgspec.structs.replace(lease, until_mono=self._clock() + lease.ttl_s, touched=touched)
        record.write(self.paths.lease, self._lease)

    def _touch(self) -> None:
        """From here on the dead-man has to start the service again: it may run the trial, or be stopped for it."""
        if self._lease is not None and not self._lease.touched:
            self._lease = msgspec.structs.replace(self._lease, touched=True)
            record.write(self.paths.lease, self._lease)

    def _held_by(self, token: str) -> record.LeaseRecord:
        if self._lease is None or self._lease.token != token:
            raise LeaseLost(f"rollout {token} does not hold it any more")
        return self._lease

    def _forget_lease(self) -> None:
        self._lease = None
        record.remove(self.paths.lease)

    def _commit_trial(self) -> None:
        trial = record.read(self.paths.trial, record.OverrideRecord)
        if trial is not None:
            if record.read(self.paths.staged, record.OverrideRecord) == trial:
                self.paths.staged.rename(self.paths.committed)  # on the disk already, so a full one does not matter now
                record.sync_folder(self.paths.committed.parent)
            else:
                record.write(self.paths.committed, trial)
            record.remove(self.paths.trial)

    def _lease_ended(self, lease: record.LeaseRecord) -> None:
        """The operator fell silent. If the rollout was decided as committed, finish that; else revert."""
        try:
            decided = record.decide(lease.decision, "revert")
        except OSError as error:
            self._say(f"Cannot read {lease.decision}: {error}; taking it as a revert.")
            decided = "revert"
        if decided == "commit":
            self._commit_trial()
            self._forget_lease()
            self._say(f"Rollout {lease.token} was decided as committed before its operator fell silent; committed.")
            self._run_hook(lease.on_expiry, "committed")
            return
        record.remove(self.paths.trial)
        record.remove(self.paths.staged)
        self._forget_lease()
        self.record.reverted_by_deadman = lease.token
        self.record.reverted_at_utc = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        self._say(f"Rollout {lease.token} was not heard of for {lease.ttl_s:g} s: reverted by the dead-man.")
        if lease.touched or self.unit.settled:  # else it runs what it ran, and a restart would only cost service
            self.unit.stop(lease.token)
            self.unit.start()
        self._run_hook(lease.on_expiry, "reverted")

    def _drop_trial(self) -> None:
        """A reboot means revert."""
        if self.paths.trial.exists():
            self._say("A trial from before the last boot was found; dropped.")
        record.remove(self.paths.trial)
        self._forget_lease()

    def _run_hook(self, argv: tuple[str, ...], outcome: str) -> None:
        if not argv:
            return
        try:
            hook = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                    env={**self._env, "OPSCTL_OUTCOME": outcome}, start_new_session=True)  # fmt: skip
        except OSError as error:
            self._say(f"The dead-man could not run {argv[0]}: {error}")
            return
        hook.returncode = 0  # reaped by the loop, not by Popen
        self._hooks[hook.pid] = self._clock() + _HOOK_S

    def _say(self, text: str) -> None:
        self._log.say(self.record.invocation_id, text)


def planned(service: definition.Definition, paths: record.Folder) -> record.OverrideRecord:
    """What a start would run. Variables of all three add up, as they do in systemd's drop-ins."""
    argv, env, mounts = tuple(service.argv), dict(service.env), dict[str, str]()
    for path in (paths.committed, paths.trial):
        found = record.read(path, record.OverrideRecord)
        if found is not None:
            argv, env, mounts = found.argv, env | found.env, found.mounts
    return record.OverrideRecord(argv, env, mounts)


def _take_lock(path: Path, name: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ServiceError(f"{name}: a supervisor is running already; see `opsctl service status {name}`") from None
    return descriptor


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _drain(end: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while end.recv(4096):
            pass
