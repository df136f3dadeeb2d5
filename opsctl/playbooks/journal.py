"""What a run of a playbook left: the same document with results, written anew after each step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from monitors.capture.redact import Policy, redact
from opsctl import wholefile
from opsctl.rollout.checks import Check

_KEPT = 200  # runs of one deployment
_WORDS_STAY = Policy(include_prompts=True)  # a playbook's own texts are no client's


class StepResult(msgspec.Struct, frozen=True):
    """``outcome``: passed, failed, skipped (it was not its turn), held (nobody agreed to it) or interrupted."""

    name: str
    action: str
    told: str
    outcome: str
    began_utc: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    why: str = ""
    said: str = ""
    approved_by: str = ""


class Record(msgspec.Struct):
    """One run. ``outcome``: done, not begun, failed, rolled back, stuck, held, interrupted; empty while it goes on."""

    id: str
    playbook: str
    kind: str
    deployment: str
    by: str
    reason: str
    began_utc: str
    document: dict[str, Any]
    before: list[Check] = []
    method: list[StepResult] = []
    rollbacks: list[StepResult] = []
    after: list[Check] = []
    outcome: str = ""
    why: str = ""
    ended_utc: str = ""
    page_sent: bool | None = None


def utc(now_unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_unix_s))


def shown(record: Record) -> dict[str, Any]:
    """The record as plain values, without the secrets that commands, variables and outputs may hold."""
    found: dict[str, Any] = _clean(msgspec.to_builtins(record), "")
    return found


def _clean(value: Any, key: str) -> Any:
    if isinstance(value, str):
        head = f"{key}: "  # a secret may be one by its name alone
        return redact(head + value, "playbook.json", _WORDS_STAY)[0].removeprefix(head)
    if isinstance(value, list):
        return [_clean(inner, key) for inner in value]
    return {name: _clean(inner, name) for name, inner in value.items()} if isinstance(value, dict) else value


def keeper(folder: Path) -> Callable[[Record], None]:
    """A function that writes the record to ``folder``, whole or not at all, and lets the oldest runs go."""

    def keep(record: Record) -> None:
        wholefile.write(folder / f"{record.id}.json", (json.dumps(shown(record), indent=1) + "\n").encode())
        for old in sorted(folder.glob("*.json"))[:-_KEPT]:
            old.unlink(missing_ok=True)

    return keep
