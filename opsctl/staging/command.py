"""Running opsctl as an operator would, and reading its JSON envelope."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opsctl.staging.waiting import StageError


def envelope(words: Sequence[str], env: Mapping[str, str], log: Path, deadline_s: float) -> dict[str, Any]:
    """``opsctl WORDS --json``; what it says beside goes to ``log``. Raises StageError when no envelope comes in time."""
    told = f"opsctl {' '.join(words[:2])}"
    with log.open("a") as said:
        said.write(f"$ opsctl {' '.join(words)}\n")
        said.flush()
        try:
            done = subprocess.run([sys.executable, "-m", "opsctl.cli", *words, "--json"], env=dict(env), stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=said, text=True, timeout=deadline_s, check=False)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise StageError(f"{told}: no end in {deadline_s:g} s; see {log}") from error
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise StageError(f"{told}: exit code {done.returncode} and no JSON; see {log}") from error
    return found
