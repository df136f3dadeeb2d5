"""systemd as the service manager, here or on a node behind ssh: system units, and user units with ``user=True``."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from typing import Protocol

from monitors.remote import Done, NodeError
from opsctl.service import dropin, journal, preflight
from opsctl.service.deadman import CAT, DeadMan
from opsctl.service.fragment import Fragment
from opsctl.service.manager import Change, Command, Lease, Line, Override, ServiceError, Snapshot, State, UnitFile, UnitSource, Unreachable

_PROPERTIES = ",".join(
    ("InvocationID", "NRestarts", "MainPID", "ActiveState", "SubState", "Result", "Type", "StatusText",
     "ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic")
)  # fmt: skip
_STATES = {"active": State.active, "reloading": State.active, "inactive": State.inactive, "failed": State.failed,
           "activating": State.activating, "deactivating": State.deactivating}  # fmt: skip
_ANSWER_S = 20.0
_PIDS = '[ -z "$1" ] || find "/sys/fs/cgroup$1" -name cgroup.procs -exec cat {} + 2>/dev/null; exit 0'
_OWED = 'for f in "$1"/*; do [ ! -f "$f" ] || { cat "$f"; printf "\\036"; }; done'
_EMPTY, _REMOVE, _READABLE = 'rm -f "$1"/*', 'rm -f "$1"', 'chmod 644 "$1"'
_AS_USER = 'export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"; exec "$@"'
_WRITE = 'set -e; mkdir -p "$1"; umask "$3"; cat >"$1/.opsctl.$$"; sync "$1/.opsctl.$$"; mv -f "$1/.opsctl.$$" "$1/$2"; sync "$1"'

# The start that is told to stop is written down first: a monitor that sees it end looks there whether that was ordered.
_MARK = 'mkdir -p "$1" && systemctl "$2" show -p InvocationID --value "$3" >"$1/ordered"'
SCRIPTS = (preflight.LEFTOVERS, _PIDS, _OWED, _EMPTY, _REMOVE, _READABLE, _WRITE, _MARK)
"""Whatever shell text this file sends to a node (see ``gate.py``)."""


class Node(Protocol):
    """Where commands run: ``monitors.remote.Remote``."""

    name: str

    def run(self, command: list[str], *, deadline_s: float, stdin: bytes = b"") -> Done: ...


class SystemdService:
    def __init__(self, node: Node, unit: str, *, user: bool = False) -> None:
        self._node, self._unit, self._user = node, unit, user
        self._scope = "--user" if user else "--system"
        self._folders: tuple[str, str, str] | None = None

    @property
    def name(self) -> str:
        return f"{self._unit}@{self._node.name}"

    @property
    def node(self) -> str:
        return self._node.name

    # Commands on the node.

    def _do(self, *command: str, stdin: bytes = b"", deadline_s: float = _ANSWER_S) -> Done:
        if self._user:  # an ssh session without a login has no XDG_RUNTIME_DIR, and nobody then finds the user's manager
            command = ("sh", "-c", _AS_USER, "opsctl", *command)
        try:
            return self._node.run(list(command), deadline_s=deadline_s, stdin=stdin)
        except NodeError as error:
            raise (ServiceError if error.kind == "failed" else Unreachable)(str(error)) from error

    def _must(self, *command: str, stdin: bytes = b"", deadline_s: float = _ANSWER_S) -> str:
        done = self._do(*command, stdin=stdin, deadline_s=deadline_s)
        if done.code:
            why = done.err or f"exit status {done.code}"
            raise ServiceError(f"{self._node.name}: {self._unit}: {shlex.join(command[:4])}: {why}")
        return done.out.decode(errors="replace")

    def must(self, script: str, *arguments: str, stdin: bytes = b"") -> str:
        return self._must("sh", "-c", script, "opsctl", *arguments, stdin=stdin)

    def do(self, script: str, *arguments: str, stdin: bytes = b"") -> Done:
        return self._do("sh", "-c", script, "opsctl", *arguments, stdin=stdin)

    def put(self, folder: str, name: str, data: bytes, *, private: bool = False) -> None:
        """A file written whole: under another name, on the disk, then renamed. ``private``: for its owner's eyes."""
        self.must(_WRITE, folder, name, "077" if private else "022", stdin=data)

    def _systemctl(self, *arguments: str) -> str:
        return self._must("systemctl", self._scope, *arguments)

    def _show(self, properties: str) -> dict[str, str]:
        text = self._systemctl("show", "-p", properties, self._unit)
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def _paths(self) -> tuple[str, str, str]:
        """(folder of the committed drop-in, of the trial, of the dead-man's files) on the node."""
        if self._folders is None:
            etc, run, own = "/etc/systemd/system", "/run/systemd/system", "/run/opsctl"
            if self._user:
                etc, run = self.must('echo "${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user"; echo "$XDG_RUNTIME_DIR"').splitlines()
                run, own = f"{run}/systemd/user", f"{run}/opsctl"
            self._folders = (f"{etc}/{self._unit}.d", f"{run}/{self._unit}.d", f"{own}/{self._unit}")
        return self._folders

    # State.

    def snapshot(self) -> Snapshot:
        found = self._show(_PROPERTIES)
        says_ready = found["Type"].startswith("notify")
        return Snapshot(
            invocation_id=found["InvocationID"], state=_STATES.get(found["ActiveState"], State.failed),
            main_pid=int(found["MainPID"]), restarts=int(found["NRestarts"]), result=found["Result"],
            since_mono=int(found["ExecMainStartTimestampMonotonic"]) / 1e6,
            waiting_to_restart=found["SubState"].startswith("auto-restart"), status=found.get("StatusText", ""),
            ready_mono=int(found["ActiveEnterTimestampMonotonic"]) / 1e6 if found["ActiveState"] == "active" and says_ready else 0.0,
        )  # fmt: skip

    def argv(self) -> tuple[str, ...]:
        pid = self.snapshot().main_pid
        done = self._do("cat", f"/proc/{pid}/cmdline") if pid else None
        return tuple(part.decode(errors="replace") for part in done.out.split(b"\0")[:-1]) if done and not done.code else ()

    def command(self) -> Command:
        """From the bus, where arguments are a list: ``systemctl show`` joins them beyond repair."""
        escaped = "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):02x}" for c in self._unit)
        bus = "org.freedesktop.systemd1"
        text = self._must("busctl", self._scope, "--json=short", "get-property", bus,
                          f"/org/freedesktop/systemd1/unit/{escaped}", f"{bus}.Service", "ExecStart", "Environment")  # fmt: skip
        start, environment = (json.loads(line)["data"] for line in text.splitlines())
        if len(start) != 1:
            raise ServiceError(f"{self._unit}: has {len(start)} ExecStart commands; a rollout needs exactly one")
        change = self.read_change()
        in_force = change.trial or change.committed
        argv = tuple(dropin.unescape(word, self.name) for word in start[0][1])
        mounts, unit = (dict(in_force.mounts), in_force.unit) if in_force else ({}, None)
        return Command(argv, dict(item.split("=", 1) for item in environment), mounts, unit.name if unit else "")

    def pids(self) -> tuple[int, ...]:
        group = self._show("ControlGroup").get("ControlGroup", "")
        text = self.must(_PIDS, group)
        return tuple(int(word) for word in text.split())

    def image(self) -> str:
        return ""

    def has_image(self, name: str) -> bool:
        return False

    def run_dir(self) -> str:
        names = self._show("RuntimeDirectory").get("RuntimeDirectory", "").split()
        base = self.must('echo "$XDG_RUNTIME_DIR"').strip() if self._user else "/run"
        return f"{base}/{names[0]}" if names else ""

    def preflight(self) -> tuple[str, ...]:
        found = self._show(preflight.PROPERTIES)
        left = self.must(preflight.LEFTOVERS, found.get("ControlGroup", ""), found.get("InvocationID", "")).split()
        return preflight.problems(self._unit, found, left)

    def stop_limit_s(self) -> float:
        return _seconds(self._show("TimeoutStopUSec").get("TimeoutStopUSec", ""))

    def committed_file(self, override: Override | None) -> tuple[str, str]:
        return f"{self._paths()[0]}/{dropin.COMMITTED}", dropin.render(override) if override else ""

    def trial_path(self) -> str:
        return f"{self._paths()[1]}/{dropin.TRIAL}"

    def begin_start(self) -> None:
        self._do("systemctl", self._scope, "reset-failed", self._unit)  # a tripped start limit would refuse the start
        self._systemctl("--no-block", "start", self._unit)

    def begin_stop(self) -> None:
        self._deadman.touch()
        self.do(_MARK, self._paths()[2], self._scope, self._unit)  # without it there is one page too many
        self._systemctl("--no-block", "stop", self._unit)

    # The change and its dead-man.

    def read_change(self) -> Change:
        """A committed drop-in whose unit file a power cut kept from its place says so by having none."""
        committed, trial = (self._override(f"{self._paths()[at]}/{name}") for at, name in ((0, dropin.COMMITTED), (1, dropin.TRIAL)))
        if committed and committed.unit and self._fragment.is_before(committed.unit):
            committed = dataclasses.replace(committed, unit=None)
        return Change(committed, trial)

    def _override(self, path: str) -> Override | None:
        text = self.must(CAT, path)
        return dropin.parse(text, f"{self._node.name}:{path}") if text else None

    @property
    def _deadman(self) -> DeadMan:
        committed, trial, own = self._paths()
        python = getattr(self._node, "python", "") or "python3"
        return DeadMan(self, self._unit, self.node, self._scope, own, f"{trial}/{dropin.TRIAL}", f"{committed}/{dropin.COMMITTED}", python,
                       f"{self._state()}/owed")  # fmt: skip

    def arm(self, lease: Lease) -> None:
        self._deadman.arm(lease, lambda *words: self._must("systemd-run", self._scope, *words))

    def renew(self, token: str, ttl_s: float) -> None:
        self._deadman.renew(token, ttl_s)

    def disarm(self, token: str) -> None:
        self._deadman.disarm(token)

    def lease_token(self) -> str:
        return self._deadman.token()

    def decide(self, lease: Lease, wish: str) -> str:
        return self._deadman.decide(lease.token, wish)

    def decided(self, lease: Lease) -> str:
        return self._deadman.decided(lease.token)

    def write_trial(self, override: Override) -> None:
        self._deadman.touch()
        fresh = override.unit is not None and override.unit != self._committed_unit()
        if override.unit is not None and fresh:
            self._fragment.lay(override.unit)
        self.put(self._paths()[1], dropin.TRIAL, dropin.render(override).encode())
        self._systemctl("daemon-reload")
        if fresh and (read := self._show("FragmentPath").get("FragmentPath", "")) != self._fragment.hidden:
            raise ServiceError(f"{self.name}: systemd reads {read}, not the trial {self._fragment.hidden}; something hides it")

    def prepare_commit(self, lease: Lease) -> None:
        self._deadman.prepare(lease.token)

    def commit_trial(self) -> None:
        self._deadman.commit()
        self._systemctl("daemon-reload")

    def withdraw(self, lease: Lease) -> bool:
        return self._deadman.withdraw(lease.token)

    def restore(self, override: Override | None) -> None:
        """The drop-in names both unit files for as long as either may lie there: it is written first on the way
        forward and last on the way back."""
        committed, now, wanted = self._paths()[0], self._committed_unit(), override.unit if override else None
        back = bool(now or wanted) and not self._fragment.is_before(wanted)
        if back:
            self._fragment.settle(now, wanted)
        if override is None:
            self.must(_REMOVE, f"{committed}/{dropin.COMMITTED}")
        else:
            self.put(committed, dropin.COMMITTED, dropin.render(override).encode())
        if wanted and not back:
            self._fragment.settle(None, wanted)
        self.remove_trial()

    def remove_trial(self) -> None:
        self._deadman.go_back()
        self._systemctl("daemon-reload")

    # The unit's own file.

    @property
    def _fragment(self) -> Fragment:
        committed, trial, _ = (path.removesuffix(".d") for path in self._paths())
        folder, _, unit = trial.rpartition("/")
        return Fragment(self, self._unit, self.node, self._scope, committed, f"{folder}.control/{unit}", f"{self._state()}/kept")

    def _committed_unit(self) -> UnitFile | None:
        found = self._override(f"{self._paths()[0]}/{dropin.COMMITTED}")
        return found.unit if found else None

    def unit_source(self) -> UnitSource:
        found = self._show("FragmentPath,DropInPaths")
        return self._fragment.source(found.get("FragmentPath", ""), found.get("DropInPaths", "").split())

    def check_unit(self, text: str) -> tuple[tuple[str, ...], str]:
        return self._fragment.verify(text)

    def reverted(self) -> tuple[str, str]:
        return self._deadman.reverted()

    def set_undrain(self, argv: tuple[str, ...], deadline_s: float) -> None:
        self._deadman.set_undrain(argv, deadline_s)

    def owed(self) -> tuple[str, ...]:
        text = self.must(_OWED, f"{self._state()}/owed")
        return tuple(part.strip() for part in text.split("\x1e") if part.strip())

    def forget_owed(self) -> None:
        self.must(_EMPTY, f"{self._state()}/owed")

    # Files of its own.

    def _state(self) -> str:
        if self._user:
            return self.must('echo "${XDG_STATE_HOME:-$HOME/.local/state}/opsctl"').strip()
        return "/var/lib/opsctl"

    def kept_path(self, name: str) -> str:
        return f"{self._state()}/kept/{name}"

    def keep_file(self, name: str, data: bytes) -> None:
        self.put(f"{self._state()}/kept", name, data)
        self.must(_READABLE, f"{self._state()}/kept/{name}")

    # Reading.

    def log(self, invocation_id: str, *, last_s: float | None = None) -> tuple[Line, ...]:
        return journal.lines(self._do, invocation_id, user=self._user, last_s=last_s)

    def read_file(self, path: str) -> bytes:
        done = self._do("cat", path)
        if done.code:
            raise FileNotFoundError(f"{self._node.name}:{path}: {done.err}")
        return done.out

    def run(self, argv: tuple[str, ...], deadline_s: float) -> tuple[int, str, str]:
        env = [f"{key}={value}" for key, value in self.command().env.items()]
        done = self._do("env", *env, *argv, deadline_s=deadline_s)
        return done.code, done.out.decode(errors="replace"), done.err


_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def _seconds(text: str) -> float:
    """systemd's way of showing a time span (``1min 15s``); 0 for ``infinity`` and for what is none."""
    return sum(float(number) * _UNITS_S.get(unit, 0.0) for number, unit in re.findall(r"([\d.]+)([a-z]+)", text))
