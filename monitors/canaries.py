"""The canaries of one deployment at work: sent when it is time to, their answers judged, an unanswered one held work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from monitors.capture.bundle import auth_headers
from monitors.fleet import Deployment
from monitors.judge.canary import Answer, Canary
from monitors.judge.progress import Sample
from monitors.observe.canary import Flock


class Canaries:
    """``emit(event, **fields)`` takes what is told: ``canary`` for each answer, ``gap`` for one that did not come."""

    def __init__(self, deployment: Deployment, emit: Callable[..., None]) -> None:
        asked = deployment.canary
        self._emit = emit
        self._flock = Flock(deployment.api, idle_every_s=asked.idle_every_s, load_every_s=asked.load_every_s, deadline_s=asked.deadline_s,
                            headers=auth_headers(deployment))  # fmt: skip
        self._canary = Canary()
        self._invocation = ""

    def turn(self, sample: Sample) -> tuple[Sample, dict[str, object] | None]:
        """The sample with a canary that is on its way counted as held, whatever the server's gauges say; and the record
        of the canary when answers under load are found wrong: once, until they have been right for a while or the server
        was started anew."""
        if not self._flock.wanted:
            return sample, None
        if sample.invocation and sample.invocation != self._invocation:
            self._canary, self._invocation = self._canary.started_anew(), sample.invocation
        record = None
        came = self._flock.turn(sample.mono_s, held=sample.held, learned=bool(self._canary.recorded))
        if came is not None:
            reading, seeded, loaded = came
            if reading.value is None:
                self._emit("gap", text=reading.reason)
            elif seeded:
                self._canary, answer = self._canary.take(reading.value.digest, loaded=loaded)
                self._emit("canary", answer=answer.value, loaded=loaded, seconds=round(reading.value.seconds, 3))
                if answer is Answer.corrupt and not self._canary.declared:
                    record, self._canary = self._canary.record(), replace(self._canary, declared=True)
            else:
                self._emit("canary", answer="came", nonce=reading.value.nonce, seconds=round(reading.value.seconds, 3))
        return replace(sample, held=1.0) if self._flock.out_s is not None and sample.held == 0 else sample, record

    def close(self) -> None:
        self._flock.close()
