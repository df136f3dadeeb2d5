"""What a signature is, and the groups of findings that many of them name."""

from __future__ import annotations

from dataclasses import dataclass

from monitors.judge.verdict import Class

MOVES = ("progress", "nothing_held", "loading", "batches_go_on", "stacks_move", "counters_move")
STALL = (
    "no_progress", "idle_line_with_work", "zero_lines_repeat", "counters_flat", "log_quiet", "peer_wait", "rpc_timeout", "watchdog",
    "clients_wait", "accepted_unanswered",
)  # fmt: skip
HELD = (*STALL, "work_held", "batches_end_with_work", "in_step", "health_ok")
WEDGED = ("watchdog", "rpc_timeout", "timeouts_differ", "timeouts_equal", "desync_report", "no_progress")
DEATH = ("rank_gone", "member_gone", "traceback", "exit", "crash", "ended", "native_frames", "device_lost")


@dataclass(frozen=True)
class Signature:
    """``base`` is the confidence when only what is needed is there; ``decides`` names what would settle it. ``blind``: no
    process has said a word in it, so that a computation on the host looks the same."""

    verdict: Class
    needs: tuple[tuple[str, ...], ...]
    base: float
    unless: tuple[str, ...] = ()
    supports: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    decides: str = ""
    blind: bool = False
