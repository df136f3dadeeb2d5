"""What an operator asked for: the change in his own words, before it is held against a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from opsctl.callers.agreed import Agreed
from opsctl.rollout import flags, overlay, unitfile
from opsctl.rollout.deadlines import Asked
from opsctl.rollout.overlay import Overlay
from opsctl.rollout.unitfile import UnitWish


@dataclass(frozen=True)
class Wish:
    """``uncover``: targets whose overlay is taken away. ``allow_red``: go on although the baseline is not green;
    ``no_revert_target``: although no verified configuration is known to go back to. ``failure_budget``: how often a replica
    after the first may fail its proof and is started once more."""

    edits: tuple[flags.Edit, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    overlays: tuple[Overlay, ...] = ()
    uncover: tuple[str, ...] = ()
    image: str = ""
    package: str = ""
    model: str = ""
    times: Asked = field(default_factory=Asked)
    incident: bool = False
    allow_red: bool = False
    no_revert_target: bool = False
    attended: bool = False
    reason: str = ""
    agreed: Mapping[str, Agreed] = field(default_factory=dict)
    allowance_pct: float | None = None
    unit_files: tuple[UnitWish, ...] = ()
    failure_budget: int = 0

    def words(self) -> tuple[str, ...]:
        """The change as it is given on the command line."""
        named = (("--image", self.image), ("--package", self.package), ("--model", self.model))
        return (
            *map(str, self.edits),
            *(f"--env {key}={value}" for key, value in self.env.items()),
            *(f"--overlay {one.file}={one.target}" for one in self.overlays),
            *(f"--remove-overlay {target}" for target in self.uncover),
            *(f"{option} {value}" for option, value in named if value),
            *map(str, self.unit_files),
        )


def edits_of(set_: list[str], unset: list[str]) -> tuple[flags.Edit, ...]:
    """First what goes, then what comes. Raises EditError."""
    return (*(flags.parse_unset(text) for text in unset), *(flags.parse_set(text) for text in set_))


def overlays_of(texts: list[str]) -> tuple[Overlay, ...]:
    """Raises EditError."""
    return tuple(overlay.parse(text) for text in texts)


def unit_files_of(texts: list[str]) -> tuple[UnitWish, ...]:
    """Raises EditError."""
    return tuple(unitfile.parse(text) for text in texts)
