"""The process tree of an embedded service: starting it, and making sure that none of it is left.

The supervisor is a child subreaper, so whatever the command starts and abandons becomes the supervisor's own child
and can be found. The command gets a parent-death signal: when the supervisor is killed, its service is told to stop.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with(parent: int) -> Callable[[], None]:
    """For ``preexec_fn``: SIGTERM when the thread of ``parent`` that started the child is gone, however it ended."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(255)

    return prepare


# In a mount namespace of its own; the process stays the one that was started, so its number and its signals do too.
_MOUNT = (
    'n=$1; shift; while [ "$n" -gt 0 ]; do mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" || exit 226; '
    'shift 2; n=$((n - 1)); done; exec "$@"'
)


def overlaid(argv: Sequence[str], mounts: Mapping[str, str]) -> tuple[str, ...]:
    """``argv`` as a command that sees ``mounts`` (target -> source) in place of what is there. Needs the right to mount."""
    if not mounts:
        return tuple(argv)
    pairs = [path for target, source in sorted(mounts.items()) for path in (source, target)]
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, "opsctl", str(len(mounts)), *pairs, *argv)


def spawn(argv: Sequence[str], env: Mapping[str, str], cwd: str, output: int) -> subprocess.Popen[bytes]:
    """Start ``argv`` in a session of its own, its output to descriptor ``output``.

    The caller must be single-threaded, and the thread that calls must live as long as the child: the parent-death
    signal follows the thread. Raises OSError when the command cannot be started.
    """
    return subprocess.Popen(
        argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        preexec_fn=die_with(os.getpid()), restore_signals=True,
    )  # fmt: skip


class Process(NamedTuple):
    parent: int
    session: int
    state: str
    started: int  # clock ticks since boot: with the number, the identity of a process


def stat(pid: int) -> Process | None:
    """None when it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return Process(int(fields[1]), int(fields[3]), fields[0], int(fields[19]))


def _processes() -> dict[int, Process]:
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (process := stat(int(entry.name))) is not None:
            found[int(entry.name)] = process
    return found


def descendants(root: int, spare: frozenset[int] = frozenset()) -> list[int]:
    """Living processes below ``root``, zombies and the trees of ``spare`` left out."""
    children: dict[int, list[int]] = {}
    processes = _processes()
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found, look = [], [root]
    while look:
        for pid in children.get(look.pop(), []):
            if pid not in spare:
                look.append(pid)
                if processes[pid].state != "Z":
                    found.append(pid)
    return found


def survivors(leader: int, leader_started: int, invocation_id: str) -> list[int]:
    """What a dead supervisor left of one invocation: the members of its session, and any process whose environment
    names it (a rank that set a title has blanked its own, hence the session as well).

    The number of a session is not given out again while it has members, so it is ours unless its leader lives and
    is another process than the one that was started.
    """
    processes = _processes()
    reused = leader in processes and processes[leader].started != leader_started
    mark = f"INVOCATION_ID={invocation_id}".encode()
    found = []
    for pid, process in processes.items():
        if process.state == "Z" or pid == os.getpid():
            continue
        try:
            named = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            named = False
        if named or (process.session == leader and not reused):
            found.append(pid)
    return found


def kill(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
