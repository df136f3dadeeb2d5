"""Clients: an agent that talks without end, a scan that wants JSON, and one that asks the same again and again.

What a client counts as a good turn is its own: an answer that came, one from this server, one whose tool calls can be made.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

from monitors.judge import leak

_SCHEMA = {"type": "object", "properties": {"item": {"type": "string", "maxLength": 60}, "count": {"type": "integer"}},
           "required": ["item", "count"], "additionalProperties": False}  # fmt: skip
CONSTRAINED = {
    "messages": [{"role": "user", "content": "Describe one item in the cupboard as JSON with item and count."}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "item", "schema": _SCHEMA, "strict": True}},
    "max_tokens": 120, "temperature": 0,
}  # fmt: skip
_QUERY = {"type": "object", "properties": {"query": {"type": "string", "maxLength": 24}}, "required": ["query"],
          "additionalProperties": False}  # fmt: skip
WITH_TOOLS = {
    "messages": [{"role": "user", "content": "Is the cupboard locked? Look it up."}],
    "tools": [{"type": "function", "function": {"name": "look_up", "description": "Search the notes.", "parameters": _QUERY}}],
    "max_tokens": 64, "temperature": 0,
}  # fmt: skip
_OWN = "lb-"  # how the system_fingerprint of this engine begins
_TURNS_KEPT = 6
_TURN_S = 120.0
_RETRY_S = 0.5


@dataclass(frozen=True)
class Answer:
    """``calls``: how many tool calls it holds; ``broken``: how many the engine says that it could not read; ``fingerprint``:
    the configuration that answered, which a hosted model's answer does not have."""

    status: int  # 0: none came
    seconds: float
    text: str
    calls: int = 0
    broken: int = 0
    fingerprint: str = ""


def ask(url: str, body: Mapping[str, Any], *, timeout_s: float, key: str = "") -> Answer:
    """``key``: what the server wants of its clients, where it wants one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    begun = time.monotonic()
    try:
        got = httpx.post(
            f"{url}/v1/chat/completions", json=dict(body), headers=headers, timeout=httpx.Timeout(timeout_s, connect=3), trust_env=False
        )
    except httpx.HTTPError as error:
        return Answer(0, time.monotonic() - begun, f"{type(error).__name__}: {error}")
    seconds, data = time.monotonic() - begun, got.json()
    if got.status_code != 200:
        return Answer(got.status_code, seconds, data.get("error", {}).get("message", ""))
    said = data["choices"][0]["message"]
    return Answer(200, seconds, said["content"] or "", len(said.get("tool_calls") or ()), len(said.get("parse_failures") or ()),
                  data.get("system_fingerprint") or "")  # fmt: skip


@dataclass
class Loop(ABC):
    """Turns, one after another. ``good_at``: time.monotonic of each good one. ``discerns``: a good turn cannot come from a
    server that is configured wrongly for this client."""

    discerns: ClassVar[bool] = False

    url: str
    completed: int = 0
    failed: int = 0
    key: str = field(default="", repr=False)
    good_at: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @abstractmethod
    def turn(self) -> bool:
        """Whether it was a good one."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.turn():
                self.completed += 1
                self.good_at.append(time.monotonic())
            else:
                self.failed += 1
                self._stop.wait(_RETRY_S)

    def stop(self, wait_s: float = 30.0) -> None:
        """No further turn; ``wait_s``: for the one that is under way, which a wedged server does not end."""
        self._stop.set()
        self._thread.join(wait_s)


@dataclass
class AgentLoop(Loop):
    """Unconstrained turns; the context grows, and is trimmed so that it never has to stop."""

    _messages: list[dict[str, str]] = field(default_factory=list)

    def turn(self) -> bool:
        asked = {"role": "user", "content": f"Step {self.completed + 1}: what do we check next, and why?"}
        body = {"messages": [*self._messages, asked], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        answer = ask(self.url, body, timeout_s=_TURN_S, key=self.key)
        if answer.status == 200:
            self._messages = [*self._messages, asked, {"role": "assistant", "content": answer.text}][-2 * _TURNS_KEPT :]
        return answer.status == 200


@dataclass
class ScanLoop(Loop):
    """The same constrained request again and again. Only an answer of this engine is a good one, whoever's name it bears."""

    discerns = True

    def turn(self) -> bool:
        answer = ask(self.url, CONSTRAINED, timeout_s=_TURN_S, key=self.key)
        return answer.status == 200 and answer.fingerprint.startswith(_OWN)


@dataclass
class ToolLoop(Loop):
    """A client that offers a tool: once it is the model's to call it, once it must. Good is a turn in which no call was
    broken, no markup stood in the text, and the call that had to come did."""

    discerns = True

    def turn(self) -> bool:
        free = ask(self.url, {**WITH_TOOLS, "ignore_eos": True}, timeout_s=_TURN_S, key=self.key)
        forced = ask(self.url, {**WITH_TOOLS, "tool_choice": "required"}, timeout_s=_TURN_S, key=self.key)
        return all(map(_unbroken, (free, forced))) and forced.calls > 0


def _unbroken(answer: Answer) -> bool:
    return answer.status == 200 and not answer.broken and leak.scan(answer.text) is None
