"""A refusal: nothing was touched."""

from __future__ import annotations

from collections.abc import Sequence

from monitors.exit_codes import ExitCode
from opsctl.rollout.checks import Check


class Refused(Exception):
    """``code`` is the exit code, ``remedy`` what to do."""

    def __init__(self, code: ExitCode, message: str, remedy: str = "", checks: Sequence[Check] = ()) -> None:
        super().__init__(message)
        self.code, self.remedy, self.checks = code, remedy, tuple(checks)
