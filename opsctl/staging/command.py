"""Running opsctl as an operator would, and reading its JSON envelope."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from opsctl.staging.waiting import StageError

_POLL_S = 0.2


def envelope(
    words: Sequence[str], env: Mapping[str, str], log: Path, deadline_s: float, heard: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """``opsctl WORDS --json``; what it says beside goes to ``log``, and to ``heard`` line by line as it is said. Raises
    StageError when no envelope comes in time."""
    told = f"opsctl {' '.join(words[:2])}"
    with log.open("a") as said, log.open() as news:
        said.write(f"$ opsctl {' '.join(words)}\n")
        said.flush()
        news.seek(0, os.SEEK_END)
        until = time.monotonic() + deadline_s
        with subprocess.Popen([sys.executable, "-m", "opsctl.cli", *words, "--json"], env=dict(env), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=said, text=True) as opsctl:  # fmt: skip
            try:
                out = _until_end(opsctl, until, news, heard)
            except subprocess.TimeoutExpired as error:
                raise StageError(f"{told}: no end in {deadline_s:g} s; see {log}") from error
            finally:
                opsctl.kill()
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError as error:
        raise StageError(f"{told}: exit code {opsctl.returncode} and no JSON; see {log}") from error
    return found


def _until_end(opsctl: subprocess.Popen[str], until: float, news: TextIO, heard: Callable[[str], None] | None) -> str:
    """Its standard output. Raises TimeoutExpired at ``until`` (monotonic)."""
    part = ""
    while True:
        try:
            out, _ = opsctl.communicate(timeout=max(0.0, min(_POLL_S, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= until:
                raise
            out = None
        if heard is not None:
            *lines, part = (part + news.read()).split("\n")
            for line in lines:
                heard(line)
        if out is not None:
            return out
