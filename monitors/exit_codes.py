"""What the exit status of every command means. opsctl shares this table."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    DONE = 0  # what was asked for has been done
    INTERNAL = 1  # a bug of ours, or a page that was due and did not go out
    USAGE = 2  # wrong arguments or an invalid input file
    REVERTED = 3  # the change failed, and the revert was verified
    STUCK = 4  # the change failed, and the revert failed or is unknown
    HELD = 5  # inconclusive: held, an operator decides
    LOCKED = 6  # somebody else holds the lock
    UNREACHABLE = 7  # a node or a server does not answer
    FOUND = 9  # a wedge, a crash or a failed check was found
    INTERRUPTED = 130  # Ctrl-C
