"""Which probes there are and what each may be told to tolerate. ``probes.py`` carries them out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from opsctl.playbooks.schema import Expectation


@dataclass(frozen=True)
class Probe:
    """``tolerances``: name to default; None for one that must be given."""

    name: str
    meaning: str
    tolerances: Mapping[str, Any]


PROBES: Mapping[str, Probe] = MappingProxyType(
    {
        probe.name: probe
        for probe in (
            Probe("answer", "an unconstrained completion with a nonce comes, and is not empty", {"within_s": 60.0}),
            Probe("refusal", "a request with a JSON schema is refused at admission", {"status": 400, "within_s": 2.0}),
            Probe("constrained", "a request with a JSON schema is answered with JSON that fits it", {"within_s": 60.0}),
            Probe("health", "GET /health answers 200", {"within_s": 5.0}),
            Probe("ranks", "GET /health_scheduler answers 200: every rank's record is fresh", {"within_s": 5.0}),
            Probe("one_configuration", "all ranks say the same configuration digest", {}),
            Probe("setting", "a declared setting of /server_info, such as grammar.backend, has this value", {"name": None, "is": None}),
            Probe("command", "a command that only looks ends with one of these exit codes", {"run": None, "expects": 0, "within_s": 120.0}),
        )
    }
)


def problems_of(one: Expectation) -> list[str]:
    """What is wrong with a probe and its tolerances."""
    probe = PROBES.get(one.probe)
    if probe is None:
        near = difflib.get_close_matches(one.probe, PROBES, 1)
        return [f'probe "{one.probe}" is unknown; ' + (f'did you mean "{near[0]}"?' if near else f"there are {', '.join(PROBES)}")]
    found = []
    for name, value in one.tolerance.items():
        if name not in probe.tolerances:
            found.append(f"probe {probe.name} has no tolerance {name!r}; it takes: {', '.join(probe.tolerances) or 'none'}")
        elif name == "within_s" and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400):
            found.append(f"within_s: {value!r} is no time in seconds")
    found += [f"probe {probe.name} needs the tolerance {name!r}" for name, default in probe.tolerances.items()
              if default is None and name not in one.tolerance]  # fmt: skip
    return found


def tolerated(one: Expectation) -> dict[str, Any]:
    """The tolerances of a probe with its defaults filled in."""
    return {**PROBES[one.probe].tolerances, **one.tolerance}


def hurried(one: Expectation, most_s: float) -> Expectation:
    """The same probe, which answers within ``most_s``."""
    tolerance = tolerated(one)
    if "within_s" not in tolerance:
        return one
    return one.model_copy(update={"tolerance": {**one.tolerance, "within_s": min(tolerance["within_s"], most_s)}})
