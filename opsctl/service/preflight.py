"""Why a systemd unit must not be changed by a rollout now. Pure: what was asked of its node comes in as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opsctl.service import dropin

PROPERTIES = "LoadState,KillMode,StandardOutput,DropInPaths,NeedDaemonReload,ControlGroup,InvocationID"
# Processes of a unit's control group whose environment names another start. A rank that set its title has blanked its own.
LEFTOVERS = (
    '[ -n "$1" ] && [ -n "$2" ] || exit 0; for f in $(find "/sys/fs/cgroup$1" -name cgroup.procs 2>/dev/null); do while read -r pid; do '
    "id=$(tr '\\0' '\\n' <\"/proc/$pid/environ\" 2>/dev/null | sed -n 's/^INVOCATION_ID=//p'); "
    '[ -z "$id" ] || [ "$id" = "$2" ] || echo "$pid"; done <"$f"; done; exit 0'
)


def problems(unit: str, found: Mapping[str, str], leftovers: Sequence[str]) -> tuple[str, ...]:
    """``found``: its properties; ``leftovers``: processes that the script names. Each problem says what to do."""
    if found.get("LoadState") != "loaded":
        return (f"{unit}: LoadState is {found.get('LoadState')}; is the unit's name right?",)
    why = []
    if found.get("KillMode") in ("process", "none"):
        why.append(f"{unit}: KillMode={found['KillMode']} leaves processes behind at a stop; set KillMode=mixed")
    later = [path for path in found.get("DropInPaths", "").split() if path.rsplit("/", 1)[-1] > dropin.TRIAL]
    if later:
        why.append(f"{unit}: {', '.join(later)} sorts after {dropin.TRIAL} and would win over it; rename it")
    if found.get("NeedDaemonReload") == "yes":
        why.append(f"{unit}: its files were edited and systemd has not read them, so a rollout would carry that edit along; "
                   f"look at it with `systemctl cat {unit}`, then `systemctl daemon-reload`")  # fmt: skip
    if found.get("StandardOutput", "journal").split("+")[0] not in ("journal", "inherit"):
        why.append(
            f"{unit}: StandardOutput={found['StandardOutput']}, so a start's lines are not in the journal; set StandardOutput=journal"
        )
    if leftovers:
        why.append(f"{unit}: processes {', '.join(leftovers)} of an earlier start are still in its control group; "
                   "look at them with ps and end them")  # fmt: skip
    return tuple(why)
