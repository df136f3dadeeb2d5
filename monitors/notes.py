"""What a watch tells and does nothing about: states, suspicions, gaps, orphans, device errors, a boot that takes too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from monitors.capture.manifest import utc
from monitors.judge.progress import Judgement, Memory, State
from monitors.lookout import Look

_GAP_AGAIN_S = 60.0


class Notes:
    """Of one deployment. ``emit`` takes the event's name and its fields. ``suspicion`` is what was seen when a silence began
    that may become a stall: the evidence of before."""

    def __init__(self, boot_deadline_s: float, emit: Callable[..., None]) -> None:
        self.suspicion: dict[str, Any] | None = None
        self._boot_deadline_s = boot_deadline_s
        self._emit = emit
        self._gaps: dict[str, float] = {}
        self._orphans: set[int] = set()
        self._loading_since: float | None = None
        self._overdue = False

    def turn(self, look: Look, judgement: Judgement, previous: Memory, xids: Iterable[tuple[str, int, int]]) -> None:
        """``xids``: node, index of the GPU and the error's number, of errors that are new."""
        self._of_gaps(look)
        for row in look.orphans:
            if row.pid not in self._orphans:
                self._emit("orphan", pid=row.pid, title=row.title, node=row.node)
        self._orphans = {row.pid for row in look.orphans}
        for node, index, xid in xids:
            self._emit("xid", node=node, gpu=index, xid=xid)
        for name, count in look.errors.items():
            self._emit("errors_grew", counter=name, by=count)
        if judgement.changed:
            self._emit("state", state=judgement.state.value, previous=previous.state.value, held=judgement.held,
                       quiet_s=round(judgement.quiet_s, 2))  # fmt: skip
        self._of_boot(judgement, look.sample.mono_s)
        self._of_suspicion(judgement, previous, look)

    def _of_suspicion(self, judgement: Judgement, previous: Memory, look: Look) -> None:
        if judgement.suspicious and self.suspicion is None:
            self.suspicion = {"utc": utc(), "quiet_s": round(judgement.quiet_s, 2), "held": judgement.held, "ranks": _ranks(look)}
            self._emit("suspicion", **{name: value for name, value in self.suspicion.items() if name != "utc"})
        elif self.suspicion is not None and judgement.quiet_s == 0 and judgement.state is not State.unknown:
            if previous.state is not State.stalled:
                self._emit("silence_ended", quiet_s=round(previous.quiet_s, 2))
            self.suspicion = None

    def _of_boot(self, judgement: Judgement, now: float) -> None:
        if judgement.state is not State.loading:
            self._loading_since, self._overdue = None, False
            return
        self._loading_since = now if self._loading_since is None else self._loading_since
        if not self._overdue and now - self._loading_since > self._boot_deadline_s:
            self._overdue = True
            self._emit("boot_overdue", loading_s=round(now - self._loading_since, 1), boot_deadline_s=self._boot_deadline_s)

    def _of_gaps(self, look: Look) -> None:
        """A gap is told when it appears and once a minute while it lasts."""
        now = time.monotonic()
        for text in look.gaps:
            if now - self._gaps.get(text, -1e9) >= _GAP_AGAIN_S:
                self._gaps[text] = now
                self._emit("gap", text=text)
        self._gaps = {text: at for text, at in self._gaps.items() if text in look.gaps}


def _ranks(look: Look) -> list[dict[str, Any]]:
    rows = []
    for rank, box in sorted(look.boxes.items()):
        host, device = box.snapshot.host, box.snapshot.device
        row = {"rank": rank, "process": box.state, "phase": host.phase.name, "device": device.state.name, "step": host.step}
        rows.append({**row, "enqueued": device.enqueued, "completed": device.completed})
    return rows
