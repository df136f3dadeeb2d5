"""What a playbook needs and whether it is there: said before anything is touched."""

from __future__ import annotations

from engine import flags
from monitors import fleet
from opsctl import commandline
from opsctl.playbooks.schema import Need, Playbook


def unmet(playbook: Playbook, deployment: fleet.Deployment | None) -> list[str]:
    """Why it cannot run: each need that is not met, with the reason. ``deployment`` None: what is true of any."""
    return [f"needs {need}: {why}" for need in playbook.needs if (why := _why_not(need, deployment))]


def _why_not(need: Need, deployment: fleet.Deployment | None) -> str:
    if need.command is not None:
        return "" if commandline.has_command(need.command) else "this opsctl has no such command yet"
    if need.flag is not None:
        # Other engines' flags are known to their own programs alone: a rollout asks these before it changes anything.
        if deployment is not None and deployment.engine != "lastbatch":
            return ""
        return "" if f"--{need.flag}" in _flags() else "lastbatch has no such flag yet"
    if deployment is None:
        return ""
    if need.role is not None:
        roles = {service.role for node in deployment.node for service in node.service}
        return "" if need.role in roles else f"{deployment.name} has no service of this role, only {', '.join(sorted(roles)) or 'none'}"
    if need.engine is not None:
        return "" if need.engine == deployment.engine else f"{deployment.name} runs {deployment.engine}"
    return "" if deployment.allow_faults else f"{deployment.name} does not say allow_faults = true in the fleet file"


def _flags() -> set[str]:
    return {name for option in flags.options() for name in (option.flag, *option.aliases)}
