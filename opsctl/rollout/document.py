"""The change that a playbook describes, as a rollout's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opsctl.rollout import flags


@dataclass(frozen=True)
class Change:
    name: str
    edits: tuple[flags.Edit, ...]
    env: Mapping[str, str]
    incident: bool


def change(path: str) -> Change:
    """The one rollout step of a playbook's method; ``opsctl playbook run`` carries out all of it, with its probes.

    Raises PlaybookError for a file that cannot be used, EditError when it has not exactly one such step."""
    from opsctl.playbooks import lint  # playbooks stand on this package

    found = lint.read(Path(path)).playbook
    steps = [step.rollout for step in found.method if step.rollout is not None]
    if len(steps) != 1:
        raise flags.EditError(f"--playbook {path}: has {len(steps)} rollout steps in its method; run it whole: opsctl playbook run {path}")
    return Change(found.name, steps[0].edits(), steps[0].env, steps[0].incident)
