"""The change that a playbook describes, as a rollout's own."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opsctl.library import NotFound, Shelf
from opsctl.rollout import flags


@dataclass(frozen=True)
class Change:
    """``options``: what the step says beside flags and variables, by the option of a rollout that it stands for."""

    name: str = ""
    edits: tuple[flags.Edit, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def change(name: str, shelf: Shelf, today: datetime.date) -> Change:
    """The one rollout step of a playbook's method, by the playbook's name or its file; ``opsctl playbook run`` carries
    out all of it, with its probes.

    Raises PlaybookError for a file that cannot be used, EditError when there is none or it has not exactly one such step."""
    from opsctl.playbooks import lint  # playbooks stand on this package

    try:
        found = lint.read(shelf.find(name)).playbook
    except NotFound as error:
        raise flags.EditError(f"--playbook {name}: {error} (opsctl playbook list)") from error
    steps = [step.rollout for step in found.method if step.rollout is not None]
    if len(steps) != 1:
        raise flags.EditError(f"--playbook {name}: has {len(steps)} rollout steps in its method; run it whole: opsctl playbook run {name}")
    return Change(found.name, steps[0].edits(), steps[0].env, steps[0].options(today))
