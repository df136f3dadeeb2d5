"""Two kinds of client: an agent that talks without end, and a scan that wants JSON."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

_SCHEMA = {"type": "object", "properties": {"item": {"type": "string", "maxLength": 60}, "count": {"type": "integer"}},
           "required": ["item", "count"], "additionalProperties": False}  # fmt: skip
CONSTRAINED = {
    "messages": [{"role": "user", "content": "Describe one item in the cupboard as JSON with item and count."}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "item", "schema": _SCHEMA, "strict": True}},
    "max_tokens": 120, "temperature": 0,
}  # fmt: skip
_TURNS_KEPT = 6


@dataclass(frozen=True)
class Answer:
    status: int  # 0: none came
    seconds: float
    text: str


def ask(url: str, body: dict[str, Any], *, timeout_s: float, key: str = "") -> Answer:
    """``key``: what the server wants of its clients, where it wants one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    begun = time.monotonic()
    try:
        got = httpx.post(
            f"{url}/v1/chat/completions", json=body, headers=headers, timeout=httpx.Timeout(timeout_s, connect=3), trust_env=False
        )
    except httpx.HTTPError as error:
        return Answer(0, time.monotonic() - begun, f"{type(error).__name__}: {error}")
    data = got.json()
    text = data["choices"][0]["message"]["content"] if got.status_code == 200 else data.get("error", {}).get("message", "")
    return Answer(got.status_code, time.monotonic() - begun, text or "")


@dataclass
class AgentLoop:
    """Unconstrained turns, one after another; the context grows, and is trimmed so that it never has to stop."""

    url: str
    completed: int = 0
    failed: int = 0
    key: str = field(default="", repr=False)
    good_at: list[float] = field(default_factory=list)  # time.monotonic of each completed turn
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        messages: list[dict[str, str]] = []
        while not self._stop.is_set():
            messages.append({"role": "user", "content": f"Step {self.completed + 1}: what do we check next, and why?"})
            answer = ask(
                self.url, {"messages": messages, "max_tokens": 48, "temperature": 0, "ignore_eos": True}, timeout_s=120, key=self.key
            )
            if answer.status == 200:
                self.completed += 1
                self.good_at.append(time.monotonic())
                messages.append({"role": "assistant", "content": answer.text})
                messages = messages[-2 * _TURNS_KEPT :]
            else:
                self.failed += 1
                messages.pop()
                self._stop.wait(0.5)

    def stop(self, wait_s: float = 30.0) -> None:
        """No further turn; ``wait_s``: for the one that is under way, which a wedged server does not end."""
        self._stop.set()
        self._thread.join(wait_s)
