"""What the probes of a capture work on: the deployment's nodes, the writer, and what earlier probes found for later ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monitors.capture.manifest import Writer, utc
from monitors.capture.nodes import Lanes
from monitors.capture.redact import Policy, Redaction, redact
from monitors.engines import Dialect
from monitors.fleet import Deployment, Node, Service
from monitors.judge.scene import Gpu
from monitors.remote import Remote


@dataclass
class Field:
    """What the probes work on, and what earlier ones found for later ones. ``pids`` maps node to who to pid, where
    who is a rank's number or a process's name."""

    deployment: Deployment
    dialect: Dialect
    remotes: Mapping[str, Remote]
    writer: Writer
    headers: Mapping[str, str]
    until_s: float
    native: bool = False
    stacks: bool = True
    core_dump: bool = False
    policy: Policy = field(default_factory=Policy)
    pids: dict[str, dict[str, int]] = field(default_factory=dict)
    simulated: list[Gpu] = field(default_factory=list)
    ledger: list[Redaction] = field(default_factory=list)
    stacks_at_s: dict[str, float] = field(default_factory=dict)  # by node
    probe: str = ""  # the one that runs now
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.lanes = Lanes(node.name for node in self.deployment.node)

    def services(self) -> list[tuple[Node, Service]]:
        return [(node, service) for node in self.deployment.node for service in node.service]

    def add_text(self, path: str, text: str, *, probe: str, start: str, node: str = "", rank: int | None = None, note: str = "") -> None:
        """Keep a text after redaction."""
        clean, ledger = redact(text, path, self.policy)
        with self.lock:
            self.ledger.extend(ledger)
        self.writer.add(path, clean.encode(), probe=probe, start=start, node=node, rank=rank, note=note)

    def know(self, node: str, who: str, pid: int) -> None:
        self.pids.setdefault(node, {})[who] = pid


@dataclass(frozen=True)
class Probe:
    """``deadline_s`` is the most that it may take, ``least_s`` what it needs to be worth starting. ``unasked`` says why it is
    left out, where only some captures ask for it; empty when this one does."""

    name: str
    deadline_s: float
    least_s: float
    run: Callable[[Field, float], None]
    unasked: Callable[[Field], str] = lambda f: ""


class Rows:
    """What all nodes give for one file. A node that comes after the file was written has one of its own: ``late``
    writes it, given the node and its rows."""

    def __init__(self, late: Callable[[str, list[Any]], object]) -> None:
        self._late = late
        self._rows: list[Any] = []
        self._written = False
        self._lock = threading.Lock()

    def add(self, node: str, rows: Sequence[Any]) -> None:
        with self._lock:
            if not self._written:
                self._rows.extend(rows)
                return
        if rows:
            self._late(node, list(rows))

    def done(self) -> list[Any]:
        with self._lock:
            self._written = True
            return self._rows


def on_nodes(f: Field, work: Callable[[Node], None]) -> None:
    """On every node in its own lane; one that lags keeps the others up for a moment only."""
    nodes = {node.name: node for node in f.deployment.node}
    f.lanes.each(f.probe, lambda name: work(nodes[name]))


def everywhere(f: Field, work: Callable[[Node, Service], None]) -> None:
    """One service after another on a node, all nodes at once."""

    def node_work(node: Node) -> None:
        for service in node.service:
            work(node, service)

    on_nodes(f, node_work)


def kept_words(f: Field) -> None:
    """What was taken out of texts, by which rule: after the last text."""
    rows = [entry.to_json() for entry in f.ledger]
    f.writer.add("redactions.json", json.dumps(rows, indent=1).encode(), probe="redactions", start=utc())
