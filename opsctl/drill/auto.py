"""A drill that plays alone: its runbook's own steps are carried out, as ``opsctl runbook run --yes`` does it."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import msgspec

from monitors.exit_codes import ExitCode
from opsctl.drill.playing import Playing
from opsctl.runbooks.run import RunRecord
from opsctl.staging.waiting import StageError

_RUNBOOK_S = 900.0


@dataclass(frozen=True)
class Auto:
    mode: str = "auto"

    def respond(self, playing: Playing) -> None:
        drill = playing.drill
        if not drill.runbook:
            return
        words = ["runbook", "run", drill.runbook, "--yes"]
        words += ["--bundle", playing.bundle] if playing.bundle else []
        for name, value in drill.values.items():
            words += ["--with", f"{name}={_filled(value, playing)}"]
        words += [word for kind in drill.approve for word in ("--approve", kind)]
        words += [word for name in drill.skip for word in ("--skip", name)]
        playing.talk(f"{playing.since():6.1f} s  opsctl {' '.join(words)}")
        before = playing.score.moments.captured
        answer = playing.stage.opsctl(*words, deadline_s=_RUNBOOK_S)
        if answer["data"] is None:
            raise StageError(f"the runbook did not run: {answer['errors']}")
        playing.ran(msgspec.convert(answer["data"], RunRecord))
        if before is None and drill.verdicts:
            playing.score.false_moves.append("the runbook was begun before the evidence was taken")
        if answer["exit_code"] != ExitCode.DONE:
            playing.score.problems.append(f"the runbook ended with exit code {answer['exit_code']}: {answer['errors'][0]['message']}")


def _filled(value: str, playing: Playing) -> str:
    """What can only be known when it happens. Raises StageError."""
    if value == "stopped":
        return playing.stage.stopped_pid()
    if value == "in-30-days":
        return (datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)).isoformat()
    return value
