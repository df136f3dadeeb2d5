"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.markers import held_back


class StopStrings:
    """Lets text through up to the first stop string, holding back what may become one.

    The stop string that is complete first wins, and of two that end at the same character the longer; so the answer
    does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("stop: an empty string cannot be a stop string")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text to give out, the stop string that ended it or None). After a match nothing more comes out."""
        if self.matched is not None:
            return "", self.matched
        buffer = self._held + text
        found = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return buffer[: end - len(self.matched)], self.matched
        keep = held_back(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def finish(self) -> str:
        """The text that was held back and became no stop string."""
        text, self._held = self._held, ""
        return text
