"""The embedded service manager as a client: what ``ServiceManager`` asks, said over the supervisor's socket."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from opsctl.service import child, control, definition, log, record
from opsctl.service.manager import Change, Command, Lease, Line, Override, ServiceError, Snapshot, State, UnitSource, Unreachable
from opsctl.service.supervisor import planned

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_LAUNCH_S = 20.0
_MOMENT_S = 2.0


class EmbeddedService:
    """One service of a services folder on this machine.

    ``env`` is where run and state folders are looked for; a supervisor that is started here inherits it, and so
    does its service. ``described``: the definition itself, where no file holds it yet; it is written down before the
    first start, never by asking. Raises ServiceError for a definition that cannot be used.
    """

    @property
    def node(self) -> str:
        return "here"

    def __init__(self, folder: Path, name: str, env: Mapping[str, str], described: definition.Definition | None = None) -> None:
        self._folder, self._name, self._env, self._described = folder, name, env, described
        self._service = self._read()
        self._paths = record.Folder(self._service, env)

    def _read(self) -> definition.Definition:
        if self._described is None:
            return definition.read(self._folder, self._name, self._env)
        return definition.complete(self._described, self._folder, self._name, self._env)

    def _write_down(self) -> None:
        if self._described is not None:
            definition.write(self._folder / f"{self._name}.toml", self._described)

    @property
    def name(self) -> str:
        return self._name

    def snapshot(self) -> Snapshot:
        found = self._ask("snapshot", record.ServiceRecord(name=self._name, supervisor_pid=0))
        return Snapshot(found.invocation_id, found.state, found.main_pid, found.restarts, found.result, found.since_mono,
                        found.waiting_to_restart, found.ready_mono, status=found.status)  # fmt: skip

    def _ask(self, do: str, otherwise: record.ServiceRecord) -> record.ServiceRecord:
        """The supervisor's record; when there is no supervisor, what its last one left, told as such."""
        reply = self._if_supervised(control.Request(do=do))
        if reply is not None:
            return reply.record or otherwise
        left = record.read(self._paths.state, record.ServiceRecord)
        if left is None:
            return otherwise
        died = left.state not in (State.inactive, State.failed)
        left.main_pid, left.waiting_to_restart = 0, False
        left.state, left.result = (State.failed, "supervisor-died") if died else (left.state, left.result)
        return left

    def _if_supervised(self, request: control.Request) -> control.Reply | None:
        """The supervisor's reply; None when there is no supervisor. One that holds its lock and does not listen is
        just being born or just dying, and gets a moment for it."""
        until = time.monotonic() + _MOMENT_S
        while True:
            try:
                return control.call(self._paths.control, request)
            except control.NoSupervisor as error:
                if not self._supervised():
                    return None
                if time.monotonic() >= until:
                    raise Unreachable(f"{self._name}: its supervisor runs and does not listen on {self._paths.control}") from error
                time.sleep(0.02)

    def _supervised(self) -> bool:
        try:
            descriptor = os.open(self._paths.lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def argv(self) -> tuple[str, ...]:
        pid = self.snapshot().main_pid
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes() if pid else b""
        except OSError:
            return ()
        return tuple(part.decode(errors="replace") for part in raw.split(b"\0")[:-1])

    def command(self) -> Command:
        self._service = self._read()
        found = planned(self._service, self._paths)
        return Command(found.argv, found.env, found.mounts)

    def image(self) -> str:
        return ""

    def has_image(self, name: str) -> bool:
        return False

    def run_dir(self) -> str:
        return self._service.run_dir

    def preflight(self) -> tuple[str, ...]:
        return ()

    def pids(self) -> tuple[int, ...]:
        pid = self.snapshot().main_pid
        return (pid, *child.descendants(pid)) if pid else ()

    def kept_path(self, name: str) -> str:
        return str(self._paths.kept / name)

    def keep_file(self, name: str, data: bytes) -> None:
        target = self._paths.kept / name
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{name}.{os.getpid()}")
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(target)

    def unit_source(self) -> UnitSource:
        raise ServiceError(f"{self._name}: is run by the embedded supervisor, which has no unit files; change its definition instead")

    def check_unit(self, text: str) -> tuple[tuple[str, ...], str]:
        return (), "the embedded supervisor has no unit files"

    def stop_limit_s(self) -> float:
        return self._service.stop_s

    def committed_file(self, override: Override | None) -> tuple[str, str]:
        text = msgspec.json.encode(record.OverrideRecord.of(override)).decode() + "\n" if override else ""
        return str(self._paths.committed), text

    def trial_path(self) -> str:
        return os.path.normpath(self._paths.trial)

    # Starting and stopping.

    def begin_start(self) -> None:
        self._write_down()
        self._call(control.Request(do="start"))

    def begin_stop(self) -> None:
        if self._if_supervised(control.Request(do="stop")) is None and self.snapshot().result == "supervisor-died":
            self._launch()  # which ends what the dead one left

    def end(self) -> None:
        """Stop the service and its supervisor. Raises Locked while a rollout holds it."""
        if self._if_supervised(control.Request(do="end")) is None and self.snapshot().result == "supervisor-died":
            self._launch()
            self._if_supervised(control.Request(do="end"))

    @property
    def ended(self) -> bool:
        return not self._supervised()

    def _call(self, request: control.Request) -> control.Reply:
        """Ask the supervisor, starting one when there is none."""
        reply = self._if_supervised(request)
        if reply is None:
            self._launch()
            reply = control.call(self._paths.control, request)
        return reply

    def _launch(self) -> None:
        self._write_down()
        argv = [sys.executable, "-m", "opsctl.service.launch", "--detach", str(self._folder.absolute()), self._name]
        try:
            done = subprocess.run(argv, cwd=_PACKAGE_ROOT, env=dict(self._env), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, timeout=_LAUNCH_S, check=False)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"{self._name}: its supervisor did not come up within {_LAUNCH_S:g} s") from error
        if done.returncode and not self._supervised():
            raise ServiceError(f"{self._name}: its supervisor did not start: {done.stderr.decode(errors='replace').strip()}")

    # The change and its dead-man.

    def read_change(self) -> Change:
        committed = record.read(self._paths.committed, record.OverrideRecord)
        trial = record.read(self._paths.trial, record.OverrideRecord)
        return Change(committed.override() if committed else None, trial.override() if trial else None)

    def arm(self, lease: Lease) -> None:
        terms = record.LeaseRecord(
            token=lease.token,
            until_mono=0.0,
            ttl_s=lease.ttl_s,
            decision=lease.decision or str(self._paths.decision(lease.token)),
            on_expiry=lease.on_expiry,
        )
        self._call(control.Request(do="arm", lease=terms))

    def renew(self, token: str, ttl_s: float) -> None:
        self._call(control.Request(do="renew", token=token, ttl_s=ttl_s))

    def disarm(self, token: str) -> None:
        self._call(control.Request(do="disarm", token=token))

    def lease_token(self) -> str:
        reply = self._if_supervised(control.Request(do="lease"))
        return reply.token if reply else ""

    def decide(self, lease: Lease, wish: str) -> str:
        return record.decide(lease.decision or str(self._paths.decision(lease.token)), wish)

    def decided(self, lease: Lease) -> str:
        path = Path(lease.decision or self._paths.decision(lease.token))
        return path.read_text() if path.exists() else ""

    def write_trial(self, override: Override) -> None:
        self._call(control.Request(do="trial", override=record.OverrideRecord.of(override)))

    def prepare_commit(self, lease: Lease) -> None:
        self._call(control.Request(do="prepare", token=lease.token))

    def commit_trial(self) -> None:
        self._call(control.Request(do="commit"))

    def withdraw(self, lease: Lease) -> bool:
        path = lease.decision or str(self._paths.decision(lease.token))
        held = self.lease_token() == lease.token and self._paths.trial.exists()
        return (record.withdraw(path) if held else record.decide(path, "revert")) == "revert"

    def restore(self, override: Override | None) -> None:
        self._call(control.Request(do="restore", override=record.OverrideRecord.of(override) if override else None))

    def reverted(self) -> tuple[str, str]:
        found = self._ask("snapshot", record.ServiceRecord(name=self._name, supervisor_pid=0))
        return found.reverted_by_deadman, found.reverted_at_utc

    def set_undrain(self, argv: tuple[str, ...], deadline_s: float) -> None:
        return None  # its dead-man runs opsctl, which knows the journal

    def owed(self) -> tuple[str, ...]:
        return ()  # its pages are opsctl's own, which owes them on this machine

    def forget_owed(self) -> None:
        return None

    def remove_trial(self) -> None:
        self._call(control.Request(do="revert"))

    # Reading.

    def log(self, invocation_id: str, *, last_s: float | None = None) -> tuple[Line, ...]:
        spans = self._ask("snapshot", record.ServiceRecord(name=self._name, supervisor_pid=0)).spans
        return log.read(Path(self._service.log), spans, invocation_id)

    def read_file(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def run(self, argv: tuple[str, ...], deadline_s: float) -> tuple[int, str, str]:
        env = {**self._env, **self.command().env}
        try:
            done = subprocess.run(argv, cwd=self._service.cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                                  timeout=deadline_s, check=False)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"{argv[0]}: no answer within {deadline_s:g} s") from error
        except OSError as error:
            raise ServiceError(f"{argv[0]}: {error}") from error
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
