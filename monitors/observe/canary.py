"""Sends canary requests and gives back digests. What it cannot see: whether other people's answers are right.

Off unless the fleet file asks for it: a canary is a real request and costs real tokens.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monitors.observe import web
from monitors.observe.reading import Reading, gap

_SEEDED = "Count from one to ten in English words: one, two, three, four, five,"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Said:
    """``digest`` is of the answer's text; ``nonce`` is empty for the seeded canary."""

    digest: str
    seconds: float
    nonce: str = ""


def model_of(api: str, *, deadline_s: float, headers: Mapping[str, str] | None = None) -> Reading[str]:
    """The first model that the server names."""
    try:
        status, answer = web.ask(f"{api}/v1/models", deadline_s=deadline_s, headers=headers, most=_MOST_BYTES)
        if status != 200:
            return gap(f"GET {api}/v1/models: status {status}")
        return Reading(str(json.loads(answer)["data"][0]["id"]))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return gap(f"GET {api}/v1/models: {error}")


def ask(
    api: str, model: str, *, seeded: bool, deadline_s: float, headers: Mapping[str, str] | None = None, tokens: int = 16
) -> Reading[Said]:
    """One greedy completion. Without ``seeded`` its prompt bears a nonce, so that no cache can answer it."""
    nonce = "" if seeded else secrets.token_hex(8)
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0, "seed": 7}
    body["prompt"] = _SEEDED if seeded else f"[{nonce}] Count from one to ten: one, two,"
    started = time.monotonic()
    try:
        said = {"Content-Type": "application/json", "User-Agent": "hang-monitor-canary", **(headers or {})}
        status, answer = web.ask(f"{api}/v1/completions", deadline_s=deadline_s, headers=said, body=json.dumps(body).encode(),
                                 most=_MOST_BYTES)  # fmt: skip
        if status != 200:
            return gap(f"canary: status {status}")
        text = str(json.loads(answer)["choices"][0]["text"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return gap(f"canary: {str(error) or type(error).__name__}")
    if not text:
        return gap("canary: an answer without text")
    return Reading(Said(hashlib.sha256(text.encode()).hexdigest()[:16], time.monotonic() - started, nonce))


class Flock:
    """The canaries of one deployment: when to send which, one on its way at a time. ``idle_every_s`` and
    ``load_every_s`` are 0 for never."""

    def __init__(self, api: str, *, idle_every_s: float, load_every_s: float, deadline_s: float, headers: Mapping[str, str]) -> None:
        self._api, self._headers, self._deadline_s = api, headers, deadline_s
        self._idle_every_s, self._load_every_s = idle_every_s, load_every_s
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="canary")
        self._asking: concurrent.futures.Future[Reading[Said]] | None = None
        self._model = ""
        self._sent_s = -1e9
        self._loaded = False
        self._seeded = False

    @property
    def wanted(self) -> bool:
        return bool(self._idle_every_s or self._load_every_s)

    @property
    def out_s(self) -> float | None:
        """When the canary that is on its way was sent, on the watch's clock; None when none is."""
        return self._sent_s if self._asking is not None else None

    def turn(self, now: float, *, held: float | None, learned: bool) -> tuple[Reading[Said], bool, bool] | None:
        """Send when it is time to; the answer that has come as (reading, seeded, whether others ran beside it).
        ``learned``: the seeded canary's answer is recorded."""
        answer = None
        if self._asking is not None:
            self._loaded = self._loaded or (held or 0) > 1
            if not self._asking.done():
                return None
            answer = (self._asking.result(), self._seeded, self._loaded)
            self._asking = None
        loaded = bool(held)
        every = self._load_every_s if loaded else self._idle_every_s or (self._load_every_s if not learned else 0.0)
        if (
            every
            and held is not None
            and now - self._sent_s >= (min(every, 5.0) if self._load_every_s and not learned and not loaded else every)
        ):
            self._sent_s, self._loaded = now, loaded
            self._seeded = bool(self._load_every_s) and (loaded or not learned)
            self._asking = self._pool.submit(self._ask, self._seeded)
        return answer

    def _ask(self, seeded: bool) -> Reading[Said]:
        if not self._model:
            named = model_of(self._api, deadline_s=self._deadline_s, headers=self._headers)
            if named.value is None:
                return gap(named.reason)
            self._model = named.value
        return ask(self._api, self._model, seeded=seeded, deadline_s=self._deadline_s, headers=self._headers)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
