"""Where a service keeps its black boxes."""

from __future__ import annotations

from monitors import fleet
from monitors.observe.reading import Reading, gap
from monitors.remote import NodeError, Remote


def find(remote: Remote, service: fleet.Service, manager: str, *, deadline_s: float = 5.0) -> Reading[str]:
    """The fleet file's ``run_dir``, else /run/<RuntimeDirectory> of the systemd unit."""
    if service.run_dir:
        return Reading(service.run_dir)
    if manager != "systemd":
        return gap(f"service {service.unit}: no run_dir in the fleet file, and {manager} has no runtime directory of its own")
    try:
        done = remote.run(["systemctl", "show", "-p", "RuntimeDirectory", "--value", service.unit], deadline_s=deadline_s)
    except NodeError as error:
        return gap(str(error))
    names = done.out.decode(errors="replace").split()
    if done.code != 0 or not names:
        why = done.err or "the unit has no RuntimeDirectory="
        return gap(f"unit {service.unit} on node {remote.name}: {why}; name the folder with run_dir in the fleet file")
    return Reading(f"/run/{names[0]}")
