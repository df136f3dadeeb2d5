"""A drill that a person plays: what somebody on call would see, and nothing else. Hints are there, and cost points."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from monitors import fleet
from opsctl.drill.playing import Playing
from opsctl.runbooks.run import RunRecord


@dataclass
class Person:
    """``read`` returns a line that was typed, empty when the terminal is gone."""

    read: Callable[[], str]
    deadline_s: float
    mode: str = "attended"
    _typed: list[str] = field(default_factory=list)
    _given_up: bool = False
    _listener: threading.Thread | None = None

    def respond(self, playing: Playing) -> None:
        """Wait until service is back; give a hint whenever one is asked for."""
        values = {"FLEET": playing.stage.fleet_path, "DEPLOYMENT": playing.stage.deployment.name}
        values |= {"BUNDLE": playing.bundle} if playing.bundle else {}
        if playing.stage.own:  # where its services and their records are found
            values |= {name: playing.stage.env[name] for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "OPSCTL_MONITOR")}
        playing.talk(f"\nYou are on call. In another terminal: export {' '.join(f'{name}={value}' for name, value in values.items())}\n"
                     "Here: h and Enter for a hint (it costs points), q and Enter to give up. It is over when clients get answers again\n"
                     "and no runbook is under way.")  # fmt: skip
        if self._listener is None:  # one for all the drills of this terminal
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        self._given_up = False
        hints = self._hints(playing)

        def over() -> bool:
            while self._typed:
                word = self._typed.pop(0)
                if word == "q":
                    self._given_up = True
                if word == "h" and hints:
                    playing.score.hints += 1
                    playing.talk(f"        hint: {hints.pop(0)}")
                elif word == "h":
                    playing.talk("        there are no more hints")
            under_way = any(not record.outcome for record in self._records(playing))
            return self._given_up or (playing.good() is not None and not under_way)

        in_time = playing.until(over, self.deadline_s)
        if self._given_up or not in_time:
            playing.score.problems.append("given up" if self._given_up else f"not mended within {self.deadline_s:g} s")
            playing.deadlines = replace(playing.deadlines, mitigate_s=0.0, recover_s=0.0)  # nobody is at it any more
        for record in self._records(playing):
            playing.ran(record)

    def _listen(self) -> None:
        while line := self.read():
            self._typed.append(line.strip().lower()[:1])

    def _hints(self, playing: Playing) -> list[str]:
        """From where to look to what to do."""
        drill = playing.drill
        hints = ["read the page, then the report of the bundle: opsctl bundle show $BUNDLE"]
        hints += [f"the monitor calls it {' and '.join(playing.score.verdicts)}"] if playing.score.verdicts else []
        hints += [f"its runbook is: opsctl runbook run {drill.runbook} --fleet $FLEET --bundle $BUNDLE"] if drill.runbook else []
        return hints

    def _records(self, playing: Playing) -> list[RunRecord]:
        """Runs of runbooks since the injection, as ``opsctl runbook run`` records them step by step."""
        folder = fleet.state_root(playing.stage.env) / "runbooks" / playing.stage.deployment.name
        found = [msgspec.json.decode(path.read_bytes(), type=RunRecord) for path in sorted(folder.glob("*.json"))]
        return [record for record in found if record.began_utc >= playing.score.began_utc[:19]]
