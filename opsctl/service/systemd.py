"""systemd as the service manager, here or on a node behind ssh: system units, and user units with ``user=True``."""

from __future__ import annotations

import json
import shlex
from typing import Protocol

from monitors.remote import Done, NodeError
from opsctl.service import deadman, dropin, journal
from opsctl.service.manager import Change, Command, Lease, LeaseLost, Line, Locked, Override, ServiceError, Snapshot, State, Unreachable

_PROPERTIES = "InvocationID,NRestarts,MainPID,ActiveState,SubState,Result,ExecMainStartTimestampMonotonic"
_PREFLIGHT = "LoadState,KillMode,StandardOutput,DropInPaths,FragmentPath,RuntimeDirectory,LogNamespace"
_STATES = {"active": State.active, "reloading": State.active, "inactive": State.inactive, "failed": State.failed,
           "activating": State.activating, "deactivating": State.deactivating}  # fmt: skip
_ANSWER_S = 20.0
# No file is an empty answer, one that cannot be read is an error; one that comes into being in between is read again.
_CAT = 'for turn in 1 2 3; do cat "$1" 2>/dev/null && exit 0; [ -e "$1" ] || exit 0; done; exit 1'
_WRITE = 'set -e; mkdir -p "$1"; cat >"$1/.opsctl.$$"; sync "$1/.opsctl.$$"; mv -f "$1/.opsctl.$$" "$1/$2"; sync "$1"'


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

    def _shell(self, script: str, *arguments: str, stdin: bytes = b"") -> str:
        return self._must("sh", "-c", script, "opsctl", *arguments, stdin=stdin)

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
                etc, run = self._shell('echo "${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user"; echo "$XDG_RUNTIME_DIR"').splitlines()
                run, own = f"{run}/systemd/user", f"{run}/opsctl"
            self._folders = (f"{etc}/{self._unit}.d", f"{run}/{self._unit}.d", f"{own}/{self._unit}")
        return self._folders

    # State.

    def snapshot(self) -> Snapshot:
        found = self._show(_PROPERTIES)
        return Snapshot(
            invocation_id=found["InvocationID"], state=_STATES.get(found["ActiveState"], State.failed),
            main_pid=int(found["MainPID"]), restarts=int(found["NRestarts"]), result=found["Result"],
            since_mono=int(found["ExecMainStartTimestampMonotonic"]) / 1e6,
            waiting_to_restart=found["SubState"].startswith("auto-restart"),
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
        return Command(tuple(dropin.unescape(word, self.name) for word in start[0][1]), dict(item.split("=", 1) for item in environment))

    def run_dir(self) -> str:
        names = self._show("RuntimeDirectory").get("RuntimeDirectory", "").split()
        base = self._shell('echo "$XDG_RUNTIME_DIR"').strip() if self._user else "/run"
        return f"{base}/{names[0]}" if names else ""

    def preflight(self) -> tuple[str, ...]:
        found, problems = self._show(_PREFLIGHT), []
        if found.get("LoadState") != "loaded":
            return (f"{self._unit}: LoadState is {found.get('LoadState')}; is the unit's name right?",)
        if found.get("KillMode") in ("process", "none"):
            problems.append(f"{self._unit}: KillMode={found['KillMode']} leaves processes behind at a stop; set KillMode=mixed")
        later = [path for path in found.get("DropInPaths", "").split() if path.rsplit("/", 1)[-1] > dropin.TRIAL]
        if later:
            problems.append(f"{self._unit}: {', '.join(later)} sorts after {dropin.TRIAL} and would win over it; rename it")
        return tuple(problems)

    def begin_start(self) -> None:
        self._do("systemctl", self._scope, "reset-failed", self._unit)  # a tripped start limit would refuse the start
        self._systemctl("--no-block", "start", self._unit)

    def begin_stop(self) -> None:
        self._systemctl("--no-block", "stop", self._unit)

    # The change and its dead-man.

    def read_change(self) -> Change:
        committed, trial, _ = self._paths()
        return Change(self._override(f"{committed}/{dropin.COMMITTED}"), self._override(f"{trial}/{dropin.TRIAL}"))

    def _override(self, path: str) -> Override | None:
        text = self._shell(_CAT, path)
        return dropin.parse(text, f"{self._node.name}:{path}") if text else None

    def arm(self, lease: Lease) -> None:
        committed, trial, own = self._paths()
        held = self.lease_token()
        if held and held != lease.token:
            raise Locked(f"{self._unit} on {self.node}: held by rollout {held}")
        unit = f"opsctl-deadman-{self._unit}"
        if held != lease.token:
            # The dead-man of an earlier lease may still be at its last step, a stop that takes its time.
            wait = 'i=0; while systemctl "$1" is-active --quiet "$2"; do i=$((i + 1)); [ $i -lt 75 ] || exit 1; sleep 0.2; done'
            self._shell(wait, self._scope, unit)
        self._shell(_WRITE, own, "deadman.sh", stdin=deadman.SCRIPT.encode())
        script = deadman.FUNCTIONS + 'set -e; mkdir -p "$1"; echo "$2 $(($(now) + $3))" >"$1/.lease.$$"; mv -f "$1/.lease.$$" "$1/lease"'
        self._shell(script, own, lease.token, str(int(lease.ttl_s * 100)))
        if held != lease.token or self._do("systemctl", self._scope, "is-active", "--quiet", unit).code:
            paths = (f"{trial}/{dropin.TRIAL}", f"{committed}/{dropin.COMMITTED}")
            self._must("systemd-run", self._scope, "--quiet", "--collect", "--service-type=exec", f"--unit={unit}",
                       "sh", f"{own}/deadman.sh", own, lease.token, self._unit, *paths, self._scope, *lease.on_expiry)  # fmt: skip

    def renew(self, token: str, ttl_s: float) -> None:
        script = deadman.FUNCTIONS + (
            'read -r owner rest <"$1/lease" && [ "$owner" = "$2" ] || exit 3\n'
            'printf "%-60s\\n" "$2 $(($(now) + $3))" | dd of="$1/lease" conv=nocreat,notrunc status=none || exit 3'
        )
        done = self._do("sh", "-c", script, "opsctl", self._paths()[2], token, str(int(ttl_s * 100)))
        if done.code:
            raise LeaseLost(f"{self._unit} on {self.node}: rollout {token} does not hold it any more")

    def disarm(self, token: str) -> None:
        self._shell(
            'if read -r owner rest <"$1/lease" && [ "$owner" = "$2" ]; then rm -f "$1/lease"; fi 2>/dev/null', self._paths()[2], token
        )

    def lease_token(self) -> str:
        words = self._shell(_CAT, f"{self._paths()[2]}/lease").split()
        return words[0] if words else ""

    def decide(self, lease: Lease, wish: str) -> str:
        return self._shell(deadman.FUNCTIONS + 'mkdir -p "$1"; decide "$@"', self._paths()[2], lease.token, wish).strip()

    def decided(self, lease: Lease) -> str:
        return self._shell(_CAT, f"{self._paths()[2]}/decision-{lease.token}").strip()

    def write_trial(self, override: Override) -> None:
        self._shell(_WRITE, self._paths()[1], dropin.TRIAL, stdin=dropin.render(override).encode())
        self._systemctl("daemon-reload")

    def commit_trial(self) -> None:
        committed, trial, _ = self._paths()
        self._shell(deadman.FUNCTIONS + 'set -e; commit "$@"', f"{trial}/{dropin.TRIAL}", f"{committed}/{dropin.COMMITTED}")
        self._systemctl("daemon-reload")

    def remove_trial(self) -> None:
        self._shell('rm -f "$1"', f"{self._paths()[1]}/{dropin.TRIAL}")
        self._systemctl("daemon-reload")

    # Reading.

    def log(self, invocation_id: str) -> tuple[Line, ...]:
        return journal.lines(self._do, invocation_id, user=self._user)

    def read_file(self, path: str) -> bytes:
        done = self._do("cat", path)
        if done.code:
            raise FileNotFoundError(f"{self._node.name}:{path}: {done.err}")
        return done.out

    def run(self, argv: tuple[str, ...], deadline_s: float) -> tuple[int, str, str]:
        env = [f"{key}={value}" for key, value in self.command().env.items()]
        done = self._do("env", *env, *argv, deadline_s=deadline_s)
        return done.code, done.out.decode(errors="replace"), done.err
