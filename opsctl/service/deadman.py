"""The dead-man of a systemd unit: a POSIX shell script under a transient unit on the unit's own machine.

It needs no Python there. It reads ``/run/opsctl/UNIT/lease`` (``TOKEN HUNDREDTHS-OF-UPTIME``), which ``renew``
overwrites in place: the file is never created again, so a lease that ended cannot come back to life. When it ends
the rollout is settled (``decide``), the trial drop-in moved to its committed name or removed, with the unit file that
came with it (``fragment.py``), the unit restarted if it may run the trial, and a page sent (``nodepage.py``). It ends
when the lease is gone or belongs to another token; one that was killed at its work does the rest of it when it is back.

A disk that fills up in between stops none of this: what a decision and a commit need is on the disk before
(``wish-*``, the staged drop-in), and they are links and renames.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Protocol

from monitors.remote import Done
from opsctl.service import nodepage
from opsctl.service.manager import Lease, LeaseLost, Locked, ServiceError

FUNCTIONS = r"""
now() { read -r up rest </proc/uptime; whole=${up%.*}; part=${up#*.}; echo "$((whole * 100 + 1$part - 100))"; }
holds() { read -r owner rest <"$1/lease" && [ "$owner" = "$2" ]; } 2>/dev/null # DIR TOKEN
decide() { # DIR TOKEN WISH: the first wish stands
  [ -s "$1/wish-$3" ] || printf %s "$3" >"$1/wish-$3"
  ln "$1/wish-$3" "$1/decision-$2" 2>/dev/null; cat "$1/decision-$2"
}
of() { own=${1%/*}; own=${own%.d}; } # DROP-IN: the unit's own file beside the folder
hidden() { of "$1"; hidden="${own%/*}.control/${own##*/}"; } # TRIAL: the unit file that hides the one in /etc meanwhile
digest() { [ -e "$1" ] || return 0; sha256sum <"$1" | cut -c 1-16; }
ours() { # TRIAL COMMITTED: the unit's own file is still the one that the trial's takes the place of, or that one already
  hidden "$1"; of "$2"; [ -e "$hidden" ] || return 0; now=$(digest "$own")
  [ "$now" = "$(sed -n 's/.*"was": "\([0-9a-f]*\).*/\1/p' "$1")" ] || [ "$now" = "$(digest "$hidden")" ] || {
    echo "$own: somebody else changed it since the plan was made; it was left alone" >&2; return 5; }
}
stage() { # TRIAL COMMITTED
  ours "$1" "$2" || return
  d=${2%/*}; mkdir -p "$d" && cat "$1" >"$d/.opsctl-staged" && sync "$d/.opsctl-staged" || return 1
  hidden "$1"; [ ! -e "$hidden" ] || { cat "$hidden" >"$d/.opsctl-unit" && sync "$d/.opsctl-unit"; }
}
staged() { d=${2%/*}; hidden "$1"; cmp -s "$1" "$d/.opsctl-staged" && { [ ! -e "$hidden" ] || cmp -s "$hidden" "$d/.opsctl-unit"; }; }
commit() { # TRIAL COMMITTED: the drop-in first, which names the unit file that it belongs with and the one before it
  [ -e "$1" ] || return 0
  ours "$1" "$2" || return
  staged "$1" "$2" || stage "$1" "$2" || return 1
  d=${2%/*}; mv -f "$d/.opsctl-staged" "$2" || return 1
  hidden "$1"; of "$2"
  # Both renames before either is synced: a file system with a journal takes them together.
  [ ! -e "$hidden" ] || mv -f "$d/.opsctl-unit" "$own" || return 1
  sync "$d" "${d%/*}" && rm -f "$hidden" && rm -f "$1"
}
go_back() { # TRIAL COMMITTED
  hidden "$1"; rm -f "$hidden" "$1" "${2%/*}/.opsctl-staged" "${2%/*}/.opsctl-unit"
}
"""

SCRIPT = (
    r"""#!/bin/sh
# deadman.sh DIR TOKEN UNIT TRIAL COMMITTED SYSTEMCTL-SCOPE
dir=$1 token=$2 unit=$3 trial=$4 committed=$5 scope=$6 tries=0
"""
    + FUNCTIONS
    + r"""
# Read by the shell itself: a machine that cannot start a process must not look like a lease that is gone.
held() { owner='' until=0; read -r owner until rest <"$dir/lease"; until=${until:-0}; [ "$owner" = "$token" ]; } 2>/dev/null
ended() { [ "$(now)" -ge "$until" ]; }
tell() { # WHAT-HAPPENED: the state of the unit is told a moment later, when a start that fails at once has failed
  sleep 2; [ ! -s "$dir/undrain" ] || cp -p "$dir/page.urls" "$dir/.urls"
  sh "$dir/page.sh" "$dir" "$token" "$unit" "$1. $unit is now $(systemctl "$scope" is-active "$unit")."
}
resumed() { # killed between the end of the lease and the end of its work
  read -r owner rest <"$dir/lease.ended" && [ "$owner" = "$token" ] && [ ! -e "$dir/lease" ]
} 2>/dev/null
lift() { # what was taken out of its router goes back; that waits for a boot, and no rollout shall wait for it
  [ ! -s "$dir/undrain" ] || systemd-run "$scope" --quiet --collect -p Restart=on-failure --unit="opsctl-undrain-$unit" \
    sh "$dir/lift.sh" "$dir" "$token" "$unit" "$scope"
}
left_alone() {
  of "$committed"; resumed || mv "$dir/lease" "$dir/lease.ended"
  tell "it was decided as committed when its operator fell silent, and cannot be: somebody else changed $own, which was left alone. \
What runs is the trial, and a reboot takes it away: opsctl rollout resume"
  lift
}
while held || resumed; do
  if held && ! ended; then sleep 0.2; continue; fi
  resumed || { sleep 0.1; held || exit 0; ended || continue; }  # the first look met a renewal half written
  outcome=$(decide "$dir" "$token" revert)
  case $outcome in
    commit|revert) ;;
    *) # no answer is no decision, and is asked again; a record that cannot be made at all is none
      tries=$((tries + 1)); if [ $tries -lt 50 ] || [ -e "$dir/decision-$token" ]; then sleep 0.2; continue; fi ;;
  esac
  if [ "$outcome" = commit ]; then
    until commit "$trial" "$committed"; do
      [ $? != 5 ] || { left_alone; exit 0; }
      sleep 1; held || exit 0
    done
    resumed || mv "$dir/lease" "$dir/lease.ended"; systemctl "$scope" daemon-reload
    tell "the rollout had been decided as committed when its operator fell silent; committed here"
    lift; exit 0
  fi
  resumed || mv "$dir/lease" "$dir/lease.ended" || exit 0
  go_back "$trial" "$committed"; echo "$token $(date -u +%Y-%m-%dT%H:%M:%S+00:00)" >"$dir/reverted"
  echo "opsctl: rollout $token was not heard of in time: $unit reverted by the dead-man"
  systemctl "$scope" daemon-reload
  case $(systemctl "$scope" is-active "$unit") in active|activating|reloading) up=1 ;; *) up= ;; esac
  if [ -e "$dir/touched-$token" ] || [ -z "$up" ]; then
    systemctl "$scope" stop "$unit"
    systemctl "$scope" reset-failed "$unit" 2>/dev/null
    systemctl "$scope" --no-block start "$unit" || systemctl "$scope" --no-block restart "$unit"
    rm -f "$dir/touched-$token"
  fi
  tell "its operator fell silent, so it went back to the last committed configuration"
  lift; exit 0
done
"""
)

LIFT = r"""#!/bin/sh
# lift.sh DIR TOKEN UNIT SYSTEMCTL-SCOPE: until it is active; what fails for good stays out, and that is told.
dir=$1 token=$2 unit=$3 scope=$4 turn=0
until state=$(systemctl "$scope" is-active "$unit"); do
  [ -s "$dir/undrain" ] || exit 0
  turn=$((turn + 1)); [ "$state" != failed ] && [ $turn -lt 18000 ] || break
  sleep 0.2
done
[ -s "$dir/undrain" ] || exit 0
if [ "$state" = active ] && sh "$dir/undrain"; then rm -f "$dir/undrain"; echo "opsctl: $unit is back in its router"; exit 0; fi
[ -s "$dir/page.urls" ] || cp -p "$dir/.urls" "$dir/page.urls"
sh "$dir/page.sh" "$dir" "$token" "$unit" "$unit is $state and STILL OUT OF ITS ROUTER; put it back: sh $dir/undrain."
"""

# One operator at a time gets in. A lease that ended and whose dead-man does not run is nobody's any more: its operator
# died before there was one.
_ARM = FUNCTIONS + (
    'set -e; mkdir -p "$1"; exec 9>"$1/lock"; flock -w 5 9\n'
    'if read -r owner until <"$1/lease" && [ "$owner" != "$2" ]; then\n'
    '  if [ "$(now)" -lt "${until%% *}" ] || systemctl "$4" is-active --quiet "$5"; then echo "$owner"; exit 6; fi\n'
    "fi 2>/dev/null\n"
    'for wish in commit revert; do printf %s "$wish" >"$1/wish-$wish"; done\n'
    'rm -f "$1/lease.ended"; echo "$2 $(($(now) + $3))" >"$1/.lease.$$"; mv -f "$1/.lease.$$" "$1/lease"'
)
# The dead-man of an earlier lease may still be at its last step, a stop that takes its time.
_SETTLE = 'i=0; while systemctl "$1" is-active --quiet "$2"; do i=$((i + 1)); [ $i -lt 75 ] || exit 1; sleep 0.2; done'
_RENEW = FUNCTIONS + (
    'holds "$1" "$2" || exit 3; systemctl "$4" is-active --quiet "$5" || exit 4\n'
    'printf "%-60s\\n" "$2 $(($(now) + $3))" | dd of="$1/lease" conv=nocreat,notrunc status=none || exit 3'
)
_PREPARE = FUNCTIONS + 'holds "$1" "$2" || exit 3; [ ! -e "$3" ] || stage "$3" "$4"'
_WITHDRAW = FUNCTIONS + (
    'd="$1/decision-$2"; [ "$(cat "$d" 2>/dev/null)" = commit ] || { decide "$1" "$2" revert; exit; }\n'
    'if holds "$1" "$2" && [ -e "$3" ]; then ln -f "$1/wish-revert" "$1/.withdrawn"; mv -f "$1/.withdrawn" "$d"; fi; cat "$d"'
)

_LIVES = 'systemctl "$1" is-active --quiet "$2"'
_DISARM = FUNCTIONS + 'if holds "$1" "$2"; then rm -f "$1/lease.ended" "$1/lease" "$1/touched-$2" "$1/page.urls"; fi'
_TOUCH = 'if read -r owner rest <"$1/lease"; then : >"$1/touched-$owner"; fi 2>/dev/null'
_DECIDE = FUNCTIONS + 'mkdir -p "$1"; decide "$@"'
_COMMIT = FUNCTIONS + 'commit "$@"'
# No file is an empty answer, one that cannot be read is an error; one that comes into being in between is read again.
CAT = 'for turn in 1 2 3; do cat "$1" 2>/dev/null && exit 0; [ -e "$1" ] || exit 0; done; exit 1'
_FORGET = 'rm -f "$1"'
_GO_BACK = FUNCTIONS + 'go_back "$@"'
SCRIPTS = (_ARM, _SETTLE, _RENEW, _PREPARE, _WITHDRAW, _LIVES, _DISARM, _TOUCH, _DECIDE, _COMMIT, _FORGET, _GO_BACK, CAT)
UNDRAIN = "undrain"
_CLAIM_S = 30.0  # how long arming itself may take


class Shell(Protocol):
    """How scripts get to the machine: ``must`` raises ServiceError for a bad exit status, ``do`` gives it back."""

    def must(self, script: str, *arguments: str, stdin: bytes = b"") -> str: ...
    def do(self, script: str, *arguments: str) -> Done: ...
    def put(self, folder: str, name: str, data: bytes, *, private: bool = False) -> None: ...


class DeadMan:
    """``folder``: its own, under /run. ``trial`` and ``committed``: the drop-ins. ``python``: the machine's, for pages."""

    def __init__(self, shell: Shell, unit: str, where: str, scope: str, folder: str, trial: str, committed: str, python: str,
                 owed: str) -> None:  # fmt: skip
        self._shell, self._unit, self._where, self._scope = shell, unit, where, scope
        self._folder, self._trial, self._committed, self._python, self._owed = folder, trial, committed, python, owed

    @property
    def unit(self) -> str:
        return f"opsctl-deadman-{self._unit}"

    def arm(self, lease: Lease, spawn: Callable[..., object]) -> None:
        """``spawn``: systemd-run with the words that follow it."""
        held = self.token()
        if held == lease.token and not self._shell.do(_LIVES, self._scope, self.unit).code:
            return self._claim(lease, lease.ttl_s)
        if not held:
            self._shell.must(_SETTLE, self._scope, self.unit)
        self._claim(lease, max(lease.ttl_s, _CLAIM_S))  # nobody acts on it before there is a dead-man
        for name, text in (("deadman.sh", SCRIPT), *nodepage.files(lease, self._unit, self._where, self._python, self._owed)):
            self._shell.put(self._folder, name, text.encode(), private=name == nodepage.URLS)
        # One that is killed comes back, and finds its lease where it left it.
        again = ("-p", "Restart=on-failure", "-p", "RestartSec=200ms")
        options = ("--quiet", "--collect", "--service-type=exec", f"--unit={self.unit}", *again)
        own = (self._folder, lease.token, self._unit, self._trial, self._committed, self._scope)
        spawn(*options, "sh", f"{self._folder}/deadman.sh", *own)
        return self.renew(lease.token, lease.ttl_s)

    def _claim(self, lease: Lease, ttl_s: float) -> None:
        done = self._shell.do(_ARM, self._folder, lease.token, _hundredths(ttl_s), self._scope, self.unit)
        if done.code == 6:
            raise Locked(f"{self._unit} on {self._where}: held by rollout {done.out.decode(errors='replace').strip()}")
        if done.code:
            raise ServiceError(f"{self._unit} on {self._where}: cannot be armed: {done.err or f'exit status {done.code}'}")

    def renew(self, token: str, ttl_s: float) -> None:
        code = self._shell.do(_RENEW, self._folder, token, _hundredths(ttl_s), self._scope, self.unit).code
        if code == 4:
            raise LeaseLost(f"{self._unit} on {self._where}: its dead-man {self.unit} does not run any more; who ended it?")
        if code:
            raise LeaseLost(f"{self._unit} on {self._where}: rollout {token} does not hold it any more")

    def disarm(self, token: str) -> None:
        self._shell.must(_DISARM, self._folder, token)

    def token(self) -> str:
        words = self._shell.must(CAT, f"{self._folder}/lease").split()
        return words[0] if words else ""

    def touch(self) -> None:
        """From here on a revert has to start the unit again: it may run the trial, or be stopped for it."""
        self._shell.must(_TOUCH, self._folder)

    def decide(self, token: str, wish: str) -> str:
        return self._shell.must(_DECIDE, self._folder, token, wish).strip()

    def decided(self, token: str) -> str:
        return self._shell.must(CAT, f"{self._folder}/decision-{token}").strip()

    def prepare(self, token: str) -> None:
        done = self._shell.do(_PREPARE, self._folder, token, self._trial, self._committed)
        if done.code == 3:
            raise LeaseLost(f"{self._unit} on {self._where}: rollout {token} does not hold it any more")
        if done.code:
            raise OSError(f"{self._unit} on {self._where}: the commit cannot be prepared: {done.err or f'exit status {done.code}'}")

    def withdraw(self, token: str) -> bool:
        return self._shell.must(_WITHDRAW, self._folder, token, self._trial).strip() == "revert"

    def commit(self) -> None:
        """Raises ServiceError, also where somebody else changed the unit's own file meanwhile, which is left alone."""
        done = self._shell.do(_COMMIT, self._trial, self._committed)
        if done.code:
            raise ServiceError(f"{self._unit} on {self._where}: the commit failed: {done.err.strip() or f'exit status {done.code}'}")

    def reverted(self) -> tuple[str, str]:
        """The rollout that it reverted last, and when."""
        token, _, at_utc = self._shell.must(CAT, f"{self._folder}/reverted").strip().partition(" ")
        return token, at_utc

    def set_undrain(self, argv: tuple[str, ...], deadline_s: float) -> None:
        if argv:
            self._shell.put(self._folder, "lift.sh", LIFT.encode())
            self._shell.put(self._folder, UNDRAIN, f"exec timeout {deadline_s:g} {shlex.join(argv)}\n".encode(), private=True)
        else:
            self._shell.must(_FORGET, f"{self._folder}/{UNDRAIN}")

    def go_back(self) -> None:
        """The trial is gone, with the unit file that came with it."""
        self._shell.must(_GO_BACK, self._trial, self._committed)


def _hundredths(seconds: float) -> str:
    return str(int(seconds * 100))
