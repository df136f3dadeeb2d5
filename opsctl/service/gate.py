"""What one key may do on a node: the ssh forced command that lets through what opsctl's rollouts send, and nothing else.

This file is the program itself: ``opsctl service gate UNIT...`` prints it with its tables filled in, to be put on the
node and named in ``authorized_keys`` (docs/least-privilege.md). It needs Python 3 there and nothing of ours. A key
behind it can start, stop and reconfigure the named units, within what a drop-in of ours says (a command line,
variables, mounted files), read their journal and black boxes, and run the unit's own program as the unit's own user.
It cannot run anything else, nor change who the unit runs as.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from typing import Dict, List  # noqa: UP035

Tables = Dict[str, List[str]]  # noqa: UP006 # evaluated, and the Python of a node may be old
TABLES: Tables = json.loads("""{"units": [], "scripts": [], "files": [], "collectors": [], "pythons": [], "marks": []}""")
"""``units`` that the key is for; SHA-256 of the shell ``scripts``, of the ``files`` of the dead-man and of the monitor's
``collectors`` that are let through, under the ``pythons`` that the fleet file names; of the scripts, ``marks`` is the
monitor's question whether an end was planned."""

_WORD = re.compile(r"^[A-Za-z0-9_.:@+=,-]*$")
_HEX = re.compile(r"^[0-9a-f]{1,64}$")
_MATCH = re.compile(r"^(_SYSTEMD_INVOCATION_ID|INVOCATION_ID|OBJECT_SYSTEMD_INVOCATION_ID|MESSAGE_ID|_PID)=[0-9a-f]+$")
_READS = re.compile(r"^(/proc/(\d+/cmdline|uptime|loadavg)|/run/[A-Za-z0-9_./@-]+/rank-\d+\.box)$")
_SETTING = re.compile(r"^(#.*|\[Service\]|ExecStart=.*|Environment=.*|BindReadOnlyPaths=.*|)$")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def refused(argv: list[str], stdin: bytes, tables: Tables, program: str) -> str:
    """Why this command is not let through; empty when it is. ``program``: the first word of the unit's command line."""
    if not argv:
        return "no command: this key is for opsctl alone"
    rules = {"systemctl": _systemctl, "busctl": _busctl, "systemd-run": _systemd_run, "journalctl": _journalctl, "cat": _cat,
             "sh": _sh, "env": _env}  # fmt: skip
    if argv == ["true"]:  # how a monitor asks whether the node is reached
        return ""
    if argv[0] in tables["pythons"]:
        known = sha(stdin) in tables["collectors"] and ((argv[1:2] == ["-"] and len(argv) == 3) or staying(argv, tables) > 0)
        return "" if known else "a program on standard input that is not known here"
    rule = rules.get(argv[0])
    return rule(argv, stdin, tables, program) if rule else f"{argv[0]!r} is not let through"


def staying(argv: list[str], tables: Tables) -> int:
    """The length of the collector that stays and is asked line by line after it has come; 0 for any other command."""
    shape = len(argv) == 5 and argv[1:3] == ["-u", "-c"] and sha(argv[3].encode()) in tables["scripts"] and argv[4].isdigit()
    return int(argv[4]) if shape and argv[0] in tables["pythons"] else 0


def _systemctl(argv: list[str], stdin: bytes, tables: Tables, program: str) -> str:
    rest = [word for word in argv[1:] if word not in ("--system", "--no-block")]
    if rest == ["daemon-reload"]:
        return ""
    if rest[:2] == ["show", "-p"] and len(rest) == 4 and _WORD.match(rest[2]) and rest[3] in tables["units"]:
        return ""
    return "" if len(rest) == 2 and rest[0] in ("start", "stop", "reset-failed") and rest[1] in tables["units"] else "not this systemctl"


def _busctl(argv: list[str], stdin: bytes, tables: Tables, program: str) -> str:
    names = ["".join(c if c.isascii() and c.isalnum() else f"_{ord(c):02x}" for c in unit) for unit in tables["units"]]
    bus = "org.freedesktop.systemd1"
    wanted = [["busctl", "--system", "--json=short", "get-property", bus, f"/org/freedesktop/systemd1/unit/{name}", f"{bus}.Service",
               "ExecStart", "Environment"] for name in names]  # fmt: skip
    return "" if argv in wanted else "not this busctl"


def _systemd_run(argv: list[str], stdin: bytes, tables: Tables, program: str) -> str:
    for unit in tables["units"]:
        own = f"/run/opsctl/{unit}"
        start = ["systemd-run", "--system", "--quiet", "--collect", "--service-type=exec", f"--unit=opsctl-deadman-{unit}", "-p",
                 "Restart=on-failure", "-p", "RestartSec=200ms", "sh", f"{own}/deadman.sh", own]  # fmt: skip
        end = [unit, f"/run/systemd/system/{unit}.d/zz-opsctl-90-trial.conf", f"/etc/systemd/system/{unit}.d/zz-opsctl-50.conf", "--system"]
        if argv[: len(start)] == start and argv[len(start) + 1 :] == end and _WORD.match(argv[len(start)]):
            return ""
    return "not this systemd-run"


def _journalctl(argv: list[str], stdin: bytes, tables: Tables, program: str) -> str:
    if argv == ["journalctl", "--sync"]:
        return ""
    if argv[1:7] == ["-o", "json", "--all", "-f", "-n", "200"] and argv[7:8] == ["-u"]:
        return "" if len(argv) == 9 and argv[8] in tables["units"] else "not this unit's journal"
    if argv[1:6] == ["-o", "json", "--all", "--no-pager", "-n"] and argv[7:8] == ["-u"] and len(argv) == 9 and argv[6].isdigit():
        return "" if argv[8] in tables["units"] else "not this unit's journal"  # the last lines, into a bundle
    head, rest = argv[:6], argv[6:]
    if head != ["journalctl", "-o", "json", "--all", "--no-pager", "-q"]:
        return "not this journalctl"
    if rest and re.fullmatch(r"--since=-\d+s", rest[0]):
        rest = rest[1:]
    elif rest[:1] == ["--after-cursor"]:
        rest = rest[2:]
    return "" if rest and all(word == "+" or _MATCH.match(word) for word in rest) else "not these lines of the journal"


def _cat(argv: list[str], stdin: bytes, tables: Tables, program: str) -> str:
    return "" if len(argv) == 2 and _READS.match(argv[1]) and ".." not in argv[1] else "not this file"


def _sh(argv: list[str], stdin: bytes, tables: Tables, program: str) -> str:
    if argv[1:2] != ["-c"] or len(argv) < 4 or sha(argv[2].encode()) not in tables["scripts"]:
        return "a shell script that is not known here"
    if sha(argv[2].encode()) in tables["marks"]:
        return "" if _asks_for_marks(argv[4:], tables) else "not this unit's marks"
    allowed = ["/var/lib/opsctl/owed", "/var/lib/opsctl/kept", "/system.slice/"]
    for unit in tables["units"]:
        allowed += [f"/etc/systemd/system/{unit}.d", f"/run/systemd/system/{unit}.d", f"/run/opsctl/{unit}"]
    for word in argv[4:]:
        path = word.startswith("/")
        if ".." in word or (path and not any(word == one.rstrip("/") or word.startswith(one.rstrip("/") + "/") for one in allowed)):
            return f"{word!r} is no path of these units"
        if not path and not _WORD.match(word):
            return f"{word!r} is no word that opsctl sends"
    return _written(argv[4:], stdin, tables) if stdin else ""


def _asks_for_marks(words: list[str], tables: Tables) -> bool:
    """Was an end planned? ``words``: the dead-man's folder, an embedded supervisor's or none, the unit, a message id, a scope."""
    if len(words) != 5 or words[2] not in tables["units"] or words[0] != f"/run/opsctl/{words[2]}":
        return False
    supervisor = words[1] == "/nonexistent" or (words[1].endswith("/.supervisor") and ".." not in words[1])
    return supervisor and bool(_HEX.match(words[3])) and words[4] == "--system"


def _written(words: list[str], stdin: bytes, tables: Tables) -> str:
    """What is written: a drop-in of ours, a file of the dead-man, an overlay's bytes."""
    folder, name = words[0], words[1]
    if folder == "/var/lib/opsctl/kept":
        return "" if re.match(r"^[0-9a-f]{16}-[A-Za-z0-9_.-]+$", name) and sha(stdin).startswith(name[:16]) else "not its own name"
    if folder.startswith("/run/opsctl/"):
        return "" if name in ("page.title", "page.urls") or sha(stdin) in tables["files"] else f"{name}: not the text that is known here"
    if name not in ("zz-opsctl-50.conf", "zz-opsctl-90-trial.conf"):
        return f"{name}: not a file of opsctl's"
    lines = stdin.decode(errors="replace").split("\n")
    return "" if all(_SETTING.match(line) and not line.endswith("\\") for line in lines) else "a drop-in that sets more than it may"


def _env(argv: list[str], stdin: bytes, tables: Tables, program: str) -> str:
    rest = argv[1:]
    while rest and (rest[0] == "env" or re.match(r"^[A-Za-z_][A-Za-z0-9_]*=", rest[0])):
        rest = rest[1:]
    if rest[:1] == ["sh"]:
        return "" if rest[1:2] == ["-c"] and sha(rest[2].encode()) in tables["scripts"] else "a shell script that is not known here"
    if rest[:2] == ["test", "-e"] and len(rest) == 3:
        return ""
    asks = any(word in rest for word in ("config", "--help", "--help=all"))
    return "" if asks and program and rest[:1] == [program] else "not this program"


def show(unit: str, name: str) -> str:
    done = subprocess.run(["systemctl", "show", "-P", name, unit], capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


def main() -> int:
    line = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    try:
        argv = shlex.split(line)
    except ValueError as error:
        argv, line = [], str(error)
    size = staying(argv, TABLES)
    stdin = b"" if sys.stdin.isatty() else whole(size) if size else sys.stdin.buffer.read()
    unit = TABLES["units"][0]
    found = re.search(r"path=(\S+)", show(unit, "ExecStart"))
    why = refused(argv, stdin, TABLES, found.group(1) if found else "")
    if why:
        print(f"opsctl gate: refused: {why}", file=sys.stderr)
        subprocess.run(["logger", "-t", "opsctl-gate", f"refused: {why}: {line[:200]}"], check=False)
        return 77
    user = show(unit, "User")
    if argv[0] == "env" and user and user != "root":
        argv = ["runuser", "-u", user, "--", *argv]
    if size:
        return ask_on(argv, stdin)
    return subprocess.run(argv, input=stdin, check=False).returncode


def whole(size: int) -> bytes:
    """So many bytes of standard input and not one more: what follows is the collector's."""
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            break
        data += part
    return data


def ask_on(argv: list[str], program: bytes) -> int:
    """The collector, then whatever it is asked, until the connection ends."""
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:
            data = program
            while data:
                process.stdin.write(data)
                process.stdin.flush()
                data = os.read(0, 1 << 16)
        except BrokenPipeError:
            pass
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
