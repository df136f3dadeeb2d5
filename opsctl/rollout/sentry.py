"""The hang monitor, armed while a change is proven and watched: it looks, judges and captures as ever, and tells the rollout instead of
paging. What follows from an alarm is the rollout's affair, so the fleet file's ``on_wedge`` is left out."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monitors.daemon import Options, Watch
from monitors.fleet import Capture, Deployment, Fleet, Node, OnWedge
from monitors.judge.progress import Limits, State
from monitors.judge.verdict import Class

_TURN_S = 0.5
_CLOSE_S = 1.0
_EVIDENCE_S = 15.0
_SIGHT_S = 10.0  # how long a server may take to show that it can be judged


class Sentry:
    """Watches from a thread of its own until ``close``. ``run_dirs``: the services of the group (by the name that their
    service manager gives them) and where their black boxes are; ``bundles``: where evidence goes."""

    def __init__(self, deployment: Deployment, run_dirs: Mapping[str, str], bundles: Path, *, limits: Limits | None = None,
                 sight_s: float = _SIGHT_S) -> None:  # fmt: skip
        nodes = tuple(kept for node in deployment.node if (kept := _of_group(node, run_dirs)).service)
        watched = deployment.model_copy(update={"node": nodes, "on_wedge": OnWedge()})
        self._state = tempfile.TemporaryDirectory(prefix="opsctl-soak-")
        self._events: list[dict[str, Any]] = []
        self._error = ""
        self._stop, self._sees, self._sight_s = threading.Event(), threading.Event(), sight_s
        options = Options(limits=limits or Limits(), state_dir=Path(self._state.name), bundle_root=bundles)
        quiet = Fleet(deployment={watched.name: watched}, capture=Capture(archive=False))
        self._watch = Watch(quiet, watched, options, self._events.append)
        self._thread = threading.Thread(target=self._run, name="soak: hang monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._watch.turn().state is not State.unknown:
                    self._sees.set()
                self._stop.wait(_TURN_S)
        except Exception as error:  # the monitor's own failure is said; it is no failure of the server
            self._error = f"{type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(OSError):
                self._watch.close(deadline_s=_EVIDENCE_S)
            self._state.cleanup()

    def alarm(self) -> str:
        """What the monitor would page somebody for, with its bundle; empty while there is nothing."""
        for event in list(self._events):
            if event["event"] == "verdict" and Class(event["verdict"]).is_alarm:
                return f"the hang monitor says {event['verdict']} (confidence {event['confidence']:.2f}); evidence: {event['bundle']}"
            if event["event"] == "leak_declared":
                return f"the hang monitor says that slots leak: {event['text']}"
        return ""

    def deciding(self) -> str:
        """A stall or an end that is declared and not judged yet; empty when there is none."""
        declared = [event for event in list(self._events) if event["event"] in ("stall_declared", "crash_declared", "corruption_declared")]
        judged = [event for event in list(self._events) if event["event"] == "verdict"]
        return f"{declared[-1]['event'].replace('_', ' ')}, and no verdict yet" if len(declared) > len(judged) else ""

    def blind(self) -> str:
        """Why the monitor has seen nothing that it could judge; empty when it has."""
        self._sees.wait(self._sight_s)  # a window may be shorter than the first looks, whose metrics come later
        if self._error:
            return f"the hang monitor failed: {self._error}"
        if not self._sees.is_set():
            gaps = "; ".join(self._watch.status.get("gaps", ())) or "nothing speaks of progress"
            return f"the hang monitor could see nothing: {gaps}"
        return ""

    @property
    def grown(self) -> dict[str, float]:
        """Counters of errors that have grown meanwhile."""
        found: dict[str, float] = {}
        for event in list(self._events):
            if event["event"] == "errors_grew":
                found[event["counter"]] = found.get(event["counter"], 0.0) + event["by"]
        return found

    def close(self) -> None:
        """Ends it. Evidence that is being taken then goes on to its own end: no revert waits for it."""
        self._stop.set()
        self._thread.join(_CLOSE_S)


def _of_group(node: Node, run_dirs: Mapping[str, str]) -> Node:
    """The node with those of its services that are in the group, each with the place of its black boxes."""
    found = []
    for service in node.service:
        name = next((name for name in (f"{service.unit}@{node.name}", service.unit) if name in run_dirs), None)
        if name is not None:
            found.append(service.model_copy(update={"run_dir": service.run_dir or run_dirs[name]}))
    return node.model_copy(update={"service": tuple(found)})
