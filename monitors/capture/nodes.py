"""A node that stops answering costs a capture one wait, not one wait for each probe that is left."""

from __future__ import annotations

from collections.abc import Sequence

from monitors.capture.manifest import utc
from monitors.remote import Done, NodeError, Remote

_PING_S = 2.0


class Patient(Remote):
    """An open connection that is asked no more once its node was lost in the middle of a capture."""

    def __init__(self, remote: Remote) -> None:
        self.__dict__.update(remote.__dict__)
        self._own_dir = False  # the connection is the other's to close
        self._lost = ""

    def run(self, command: Sequence[str], *, deadline_s: float, stdin: bytes = b"") -> Done:
        if self._lost:
            raise NodeError("unreachable", self._lost)
        try:
            return super().run(command, deadline_s=deadline_s, stdin=stdin)
        except NodeError as error:
            if not self.local and (error.kind == "unreachable" or (error.kind == "deadline" and not self._answers())):
                self._lost = f"node {self.name}: not reached since {utc()} ({error}); it was not asked again"
            raise

    def _answers(self) -> bool:
        """Whether it was the command that took too long and not the node."""
        try:
            return super().run(["true"], deadline_s=_PING_S).code == 0
        except NodeError:
            return False
