"""Who listens on a port of a service's machine: a process that an earlier start left behind keeps the next one out."""

from __future__ import annotations

from opsctl.service.manager import ServiceManager

_DEADLINE_S = 15.0
# Sockets in state LISTEN (0A) on the port, IPv4 and IPv6, then the processes that hold them. Without root only
# processes of the same user are found, and the socket alone is told.
SCRIPT = r"""
hex=$(printf ':%04X' "$1")
inodes=$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | while read -r n local peer state q t r uid o inode rest; do
  case $local in *"$hex") [ "$state" = 0A ] && echo "$inode";; esac; done)
[ -n "$inodes" ] || exit 0
found=
for inode in $inodes; do
  for fd in $(find /proc/[0-9]*/fd -maxdepth 1 -lname "socket:\\[$inode\\]" 2>/dev/null); do
    pid=${fd#/proc/}; pid=${pid%%/*}
    case " $found " in *" $pid "*) continue;; esac
    found="$found $pid"
    command=$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c 1-80)
    echo "process $pid ($command) in $(sed -n 's/^0:://p' "/proc/$pid/cgroup" 2>/dev/null)"
  done
done
[ -n "$found" ] || echo "a process that this user may not look at"
"""


def holders(manager: ServiceManager, port: int) -> tuple[str, ...]:
    """One description for each process that listens on the port; empty when nobody does.

    Raises ServiceError when the machine cannot be asked."""
    _, out, _ = manager.run(("sh", "-c", SCRIPT, "opsctl", str(port)), _DEADLINE_S)
    return tuple(line.strip() for line in out.splitlines() if line.strip())
