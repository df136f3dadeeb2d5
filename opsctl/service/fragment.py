"""A systemd unit's own file, and how another one takes its place for the time of a trial.

systemd looks for a unit's file in ``/run/systemd/system.control`` before ``/etc/systemd/system`` (for a user's units in
``$XDG_RUNTIME_DIR/systemd/user.control`` before ``~/.config/systemd/user``), and in /run and /usr/lib after it. So a
trial lies in the first: it hides the administrator's file without touching it, is gone after a reboot, and is taken
away by removing one file. A commit renames a copy to /etc. The bytes of both are kept on the node under their digest,
and the committed drop-in names both, so that whoever goes back knows what was there.

What a power cut in the instant between the two renames of a commit leaves is the new drop-in over the old file, and the
next ``opsctl rollout resume`` or ``abort`` puts it right.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from monitors.remote import Done
from opsctl.service import dropin
from opsctl.service.manager import ServiceError, UnitFile, UnitSource

_SYSTEM = {"C": "/var/cache", "E": "/etc", "L": "/var/log", "S": "/var/lib", "T": "/tmp", "V": "/var/tmp", "t": "/run"}
_ID = 'id() { [ -e "$1" ] || return 0; sha256sum <"$1" | cut -c 1-16; }; '
_TEXTS = 'for f; do cat "$f" || exit 1; printf "\\036"; done'
_OWN = _ID + '[ ! -L "$1" ] || { echo link; exit 0; }; id "$1"'
# The old bytes are kept before the new ones hide them.
_KEEP = (
    'keep() { [ -z "$2" ] || [ -e "$kept/$2" ] || { cat "$1" >"$kept/.opsctl.$$" && sync "$kept/.opsctl.$$" && '
    'mv -f "$kept/.opsctl.$$" "$kept/$2"; }; }\n'
)
_LAY = (
    _ID + _KEEP + "set -e; own=$1 hidden=$2 kept=$3 new=$4 was=$5\n"
    '[ ! -L "$own" ] && [ "$(id "$own")" = "${was%%-*}" ] || exit 5\n'
    'keep "$own" "$was"\n'
    'mkdir -p "${hidden%/*}"; cat "$kept/$new" >"${hidden%/*}/.opsctl.$$"; mv -f "${hidden%/*}/.opsctl.$$" "$hidden"'
)
_PUT = (
    _ID + _KEEP + 'set -e; own=$1 kept=$2 to=$3; shift 3; now=$(id "$own")\n'
    '[ "$now" != "${to%%-*}" ] || exit 0\n'
    'for one; do [ "$now" != "${one%%-*}" ] || { keep "$own" "$one"; found=1; }; done; [ -n "${found:-}" ] || exit 5\n'
    'if [ -n "$to" ]; then cat "$kept/$to" >"${own%/*}/.opsctl.$$"; sync "${own%/*}/.opsctl.$$"; mv -f "${own%/*}/.opsctl.$$" "$own"\n'
    'else rm -f "$own"; fi; sync "${own%/*}"'
)
_VERIFY = (
    "command -v systemd-analyze >/dev/null || exit 9; d=$(mktemp -d) || exit 8; trap 'rm -rf \"$d\"' EXIT\n"
    'cat >"$d/$1"; echo "$d/$1"; systemd-analyze "$2" --man=no verify "$d/$1" 2>&1 || exit 7'
)


def name(text: str, unit: str) -> str:
    """What the bytes of a unit's file are kept under."""
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{unit}"


class Shell(Protocol):
    """How scripts get to the machine, as ``deadman.Shell``."""

    def must(self, script: str, *arguments: str, stdin: bytes = b"") -> str: ...
    def do(self, script: str, *arguments: str, stdin: bytes = b"") -> Done: ...


class Fragment:
    """``own``: where the administrator's own file lies or would lie; ``hidden``: what hides it for a trial; ``kept``:
    the folder of kept bytes. ``scope``: ``--system`` or ``--user``."""

    def __init__(self, shell: Shell, unit: str, where: str, scope: str, own: str, hidden: str, kept: str) -> None:
        self._shell, self._unit, self._where, self._scope = shell, unit, where, scope
        self._own, self.hidden, self._kept = own, hidden, kept

    def source(self, path: str, drop_ins: list[str]) -> UnitSource:
        """``path`` and ``drop_ins`` as systemd names them. Raises ServiceError where the file cannot be replaced."""
        own = self._shell.must(_OWN, self._own).strip()
        if own == "link":
            raise ServiceError(f"{self._where}: {self._own} is a link; --unit-file replaces a file, so put a file there first "
                               "(systemctl disable, then copy what it points to)")  # fmt: skip
        if path not in (self._own, self.hidden) and (own or not path):
            raise ServiceError(f"{self._where}: {self._unit} is read from {path or 'nowhere'}, which comes before {self._own}; "
                               "it is generated or transient, and a file would not replace it")  # fmt: skip
        files = (path, *drop_ins)
        texts = self._shell.must(_TEXTS, *files).split("\x1e")
        ours = frozenset(one for one in drop_ins if one.rsplit("/", 1)[-1] in (dropin.COMMITTED, dropin.TRIAL))
        return UnitSource(tuple(zip(files, texts, strict=False)), ours, self._own, f"{own}-{self._unit}" if own else "", self.hidden,
                          _SYSTEM if self._scope == "--system" else {})  # fmt: skip

    def verify(self, text: str) -> tuple[tuple[str, ...], str]:
        """See ``ServiceManager.check_unit``. A line about the file itself is an error also where systemd goes on without
        the setting: a misspelt limit is no limit."""
        done = self._shell.do(_VERIFY, self._unit, self._scope, stdin=text.encode())
        if done.code not in (0, 7):
            return (), f"systemd-analyze is not there on {self._where}" if done.code == 9 else f"{self._where}: {done.err or done.code}"
        place, _, said = done.out.decode(errors="replace").partition("\n")
        lines = [line.replace(f"{place}:", f"{self._unit}:") for line in said.splitlines() if line.strip()]
        if self._scope == "--user" and any("Failed to initialize manager" in line for line in lines):
            return (), f"systemd-analyze cannot look at a user's unit on {self._where}: {lines[-1]}"
        about = tuple(line for line in lines if line.startswith(f"{self._unit}:"))
        return (about or tuple(lines) or ("systemd-analyze verify refuses it and does not say why",) if done.code else about), ""

    def lay(self, unit: UnitFile) -> None:
        """Raises ServiceError when the administrator's file is not the one that was planned for."""
        done = self._shell.do(_LAY, self._own, self.hidden, self._kept, unit.name, unit.was)
        if done.code:
            why = "changed since the plan was made; plan again" if done.code == 5 else done.err or f"exit status {done.code}"
            raise ServiceError(f"{self._where}: {self._own}: {why}")

    def is_before(self, unit: UnitFile | None) -> bool:
        """Whether what lies there is what the file of ``unit`` takes the place of."""
        return unit is not None and self._shell.must(_OWN, self._own).strip() == unit.was.partition("-")[0]

    def settle(self, now: UnitFile | None, wanted: UnitFile | None) -> None:
        """The file that belongs to the committed override ``now`` gives way to that of ``wanted``. One that is neither's
        is the administrator's own edit: left alone where the two do not differ, else ServiceError."""
        if now is None and wanted is None:
            return
        # What lay there before, also where that was an administrator's edit of the file of ``wanted``.
        to = now.was if now and now != wanted else wanted.name if wanted else ""
        known = {one for unit in (now, wanted) if unit for one in (unit.name, unit.was)}
        done = self._shell.do(_PUT, self._own, self._kept, to, *sorted(known))
        if done.code == 5 and now == wanted:
            return
        if done.code:
            why = ("is neither the old nor the new file; somebody else changed it, so it was left alone" if done.code == 5
                   else done.err or f"exit status {done.code}")  # fmt: skip
            raise ServiceError(f"{self._where}: {self._own}: {why}")
