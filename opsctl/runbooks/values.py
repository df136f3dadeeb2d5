"""Values that a runbook's variables can be given without a person: from the incident's bundle and from the fleet file.

A runbook names them under ``fills``. There is no guess in them: two suspects, another verdict than the runbook's, a process
that is gone or lies on another machine give no value but the reason why.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from engine import blackbox
from monitors.capture import manifest
from monitors.fleet import Deployment, Node
from opsctl import pid as process
from opsctl.runbooks.document import Runbook, Step

SOURCES = ("suspect pid", "suspect unit", "half of FLAG")
_HALF = re.compile(r"half of ([a-z][a-z0-9-]*)")
_SUSPECT = re.compile(r"(?:rank (?P<rank>\d+)|process \S+) \(pid (?P<pid>\d+)(?:, node (?P<node>[^,)]+))?\)")
_SLACK_S = 2.0  # the kernel counts a start in hundredths of a second since a boot whose own time is whole seconds


@dataclass(frozen=True)
class Told:
    """``why``: where the value comes from; without a value, why there is none (empty: nothing says where to look)."""

    value: str
    why: str


@dataclass(frozen=True)
class _Suspect:
    text: str
    rank: int | None
    pid: int
    node: Node | None  # None: the fleet file has none of this name


@dataclass(frozen=True)
class Values:
    """What can be told of ``deployment`` for the variables of ``book``."""

    book: Runbook
    deployment: Deployment

    def find(self, name: str, bundle: str) -> Told:
        """``bundle`` is its folder; empty while there is none."""
        source = self.book.fills.get(name, "")
        if not source:
            return Told("", "")
        if not bundle:
            return Told("", "no bundle says it; give --bundle FOLDER")
        half = _HALF.fullmatch(source)
        if half:
            return _half(half[1], Path(bundle))
        found = self._suspect(Path(bundle))
        if isinstance(found, Told):
            return found
        return self._pid(found, Path(bundle)) if source == "suspect pid" else self._unit(found)

    def without(self, steps: tuple[Step, ...], given: Mapping[str, str], bundle: str) -> Iterator[tuple[Step, dict[str, str]]]:
        """The steps that nothing can give a value to, with the variables and why. What a capture before a step will tell is
        left to the moment when it has been taken."""
        captures = 0
        for step in steps:
            missing = {}
            for name in step.needed:
                known = name in given or (name == "BUNDLE" and captures) or (name == "SECOND" and captures + bool(bundle) > 1)
                waits = not bundle and captures and name in self.book.fills
                if not known and not waits and not (told := self.find(name, bundle)).value:
                    missing[name] = told.why
            captures += step.command.startswith("opsctl capture")
            if missing:
                yield step, missing

    def _suspect(self, bundle: Path) -> _Suspect | Told:
        try:
            verdict = json.loads((bundle / "verdict.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return Told("", f"{bundle}/verdict.json: {getattr(error, 'strerror', None) or error}")
        if verdict["verdict"] != self.book.verdict:
            return Told("", f"the bundle's verdict is {verdict['verdict']}, and this runbook is for {self.book.verdict}")
        found: dict[tuple[str, int], _Suspect] = {}
        for text in verdict["suspects"]:
            if match := _SUSPECT.match(text):
                rank = int(match["rank"]) if match["rank"] else None
                found[(match["node"] or "", int(match["pid"]))] = _Suspect(
                    text, rank, int(match["pid"]), self._node(match["node"] or "", rank)
                )
        if len(found) != 1:
            told = "; ".join(one.text for one in found.values()) or "; ".join(verdict["suspects"]) or "none"
            return Told("", f"the bundle does not name one suspect process: {told}")
        return next(iter(found.values()))

    def _node(self, name: str, rank: int | None) -> Node | None:
        nodes = self.deployment.node
        if not name and len(nodes) == 1:
            return nodes[0]
        has = (lambda node: node.name == name) if name else (lambda node: any(rank in one.ranks for one in node.service))
        return next(filter(has, nodes), None)

    def _pid(self, suspect: _Suspect, bundle: Path) -> Told:
        if away := _elsewhere(suspect):
            return Told("", away)
        if not process.started(suspect.pid):
            return Told("", f"the suspect is gone: {suspect.text}")
        head = manifest.load(bundle)
        taken = datetime.fromisoformat(head.get("end") or head["created_utc"]).timestamp()
        if _began(suspect.pid) > taken + _SLACK_S:
            return Told("", f"pid {suspect.pid} is another process by now: it began after the bundle was taken ({suspect.text})")
        return Told(str(suspect.pid), f"the suspect of the bundle's verdict: {suspect.text}")

    def _unit(self, suspect: _Suspect) -> Told:
        if away := _elsewhere(suspect):
            return Told("", away)
        assert suspect.node is not None
        services = suspect.node.service
        units = [one.unit for one in services if suspect.rank in one.ranks] or [one.unit for one in services]
        if len(units) != 1:
            return Told("", f"node {suspect.node.name} has {len(units)} units: {', '.join(units)}")
        return Told(units[0], f"the unit of the bundle's suspect: {suspect.text}")


def wrong(source: str) -> str:
    """What is wrong with the words under ``fills``; empty when they say where a value is found."""
    return "" if source in SOURCES[:-1] or _HALF.fullmatch(source) else f"{source!r} says not where; there are {', '.join(SOURCES)}"


def _elsewhere(suspect: _Suspect) -> str:
    if suspect.node is None:
        return f"the fleet file has no node of this suspect: {suspect.text}"
    if suspect.node.ssh:
        return f"the suspect is on node {suspect.node.name}: do it there (ssh {suspect.node.ssh}): {suspect.text}"
    return ""


def _began(pid: int) -> float:
    """Unix time at which a process began."""
    up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time() - up_s + int(process.started(pid) or 0) / os.sysconf("SC_CLK_TCK")


def _half(flag: str, bundle: Path) -> Told:
    """Half of what a whole number is set to, by a black box or by the server's own words."""
    for path, read in ((sorted(bundle.glob("rank-*.box")), _of_box), (sorted(bundle.glob("server_info*.json")), _of_json)):
        for one in path:
            for value in _leaves(read(one), flag.replace("-", "_")):
                if isinstance(value, int) and value > 1:
                    return Told(str(value // 2), f"half of {flag} = {value}, by {one.name} of the bundle")
    return Told("", f"no black box and no server_info of the bundle says what {flag} is")


def _of_box(path: Path) -> Any:
    try:
        return json.loads(blackbox.read(path, events=False).settings_json or "{}")
    except (blackbox.BoxError, OSError, ValueError):
        return {}  # that it cannot be read is told by the bundle's own report


def _of_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _leaves(tree: Any, name: str) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == name:
                yield value
            else:
                yield from _leaves(value, name)
