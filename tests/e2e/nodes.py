"""Real systemd nodes for tests: the ones that a replayed day is played on."""

from opsctl.staging.nodes import SystemdNode, boot, fabric, missing

__all__ = ["SystemdNode", "boot", "fabric", "missing"]
