"""The last minutes as the monitor saw them: what the status page draws and a bundle keeps as ``monitor/trail.jsonl``."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

_KEPT = 900
_EVERY_S = 1.0


class Trail:
    """A ring of samples, at most one a second."""

    def __init__(self) -> None:
        self._samples: collections.deque[dict[str, Any]] = collections.deque(maxlen=_KEPT)
        self._last_s = -1e9

    def add(self, mono_s: float, unix_s: float, state: str, held: float, quiet_s: float, steps: int | None) -> None:
        if mono_s - self._last_s < _EVERY_S:
            return
        before = self._samples[-1] if self._samples else None
        rate = 0.0
        if before is not None and steps is not None and before["step"] is not None and steps >= before["step"]:
            rate = (steps - before["step"]) / max(mono_s - self._last_s, 0.1)
        self._last_s = mono_s
        self._samples.append({"unix_s": round(unix_s, 3), "state": state, "held": held, "quiet_s": round(quiet_s, 2), "step": steps,
                              "steps_per_s": round(rate, 2)})  # fmt: skip

    def samples(self) -> list[Mapping[str, Any]]:
        return list(self._samples)

    def text(self) -> str:
        """One JSON object a line."""
        return "".join(f"{json.dumps(sample)}\n" for sample in self.samples())


def spark(values: Sequence[float], *, width: int = 360, height: int = 44) -> str:
    """The points of an SVG polyline, newest at the right edge."""
    most = max([*values, 1e-9])
    step = width / max(1, len(values) - 1)
    return " ".join(f"{i * step:.1f},{height - 2 - (height - 4) * value / most:.1f}" for i, value in enumerate(values))
