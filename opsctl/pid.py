"""Which process a pid names: a pid alone may be another's by now."""

from __future__ import annotations

from pathlib import Path


def started(pid: int) -> str:
    """Start time of a process in clock ticks since boot (proc(5)); empty when there is none of this pid."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
