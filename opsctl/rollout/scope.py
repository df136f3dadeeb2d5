"""How far the proof of a change looks: the clients, what was agreed about them, and what was seen before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from monitors.fleet import Caller, Deployment
from opsctl.callers.agreed import Agreed
from opsctl.callers.foresee import Foreseen
from opsctl.rollout.before import Before, Recorded


@dataclass(frozen=True)
class Scope:
    """``before`` None: nothing was recorded, so only what stands for itself can be judged. ``flags``: those of the plan,
    ``changed`` the names of those that are other than before. ``bundles``: where evidence goes.
    ``same_model`` False: another model is served, whose answers are others. ``allowance_pct`` None: speed is not measured."""

    deployment: Deployment
    flags: Mapping[str, str] = field(default_factory=dict)
    agreed: Mapping[str, Agreed] = field(default_factory=dict)
    foreseen: Mapping[str, Foreseen] = field(default_factory=dict)
    recorded: Mapping[str, Recorded] = field(default_factory=dict)
    before: Before | None = None
    allowance_pct: float | None = None
    same_model: bool = True
    changed: frozenset[str] = frozenset()
    bundles: Path = Path("bundles")

    @property
    def callers(self) -> tuple[Caller, ...]:
        return self.deployment.caller

    @property
    def classes(self) -> dict[str, str]:
        """What each caller got when it was last asked."""
        asked = self.before.classes if self.before else {}
        return {name: one.kind for name, one in self.recorded.items()} | asked
