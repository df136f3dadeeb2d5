"""Talking to the served API as a client: health, server information, counters, and a completion with a nonce."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

import httpx

_SHORT_S = 5.0
_NONCE_TOKENS = 24
_COUNTER = re.compile(r"^(?P<name>[\w:]+)(?:\{[^}]*\})?\s+(?P<value>[-+.\deE]+)")


class ApiError(Exception):
    """The API did not give a usable answer; the text says which route and why."""


@dataclass(frozen=True)
class Completion:
    """One answer. ``prompt_sha``: first 8 hex digits of the SHA-256 of the user message, as the engine logs it."""

    text: str
    finish: str
    fingerprint: str
    prompt_sha: str
    seconds: float


class Api:
    """Raises ApiError from every method."""

    def __init__(self, base: str, key: str = "") -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=base, headers=headers, trust_env=False)
        self.base = base

    def close(self) -> None:
        self._client.close()

    def _get(self, route: str) -> httpx.Response:
        try:
            return self._client.get(route, timeout=_SHORT_S)
        except httpx.HTTPError as error:
            raise ApiError(f"GET {self.base}{route}: {_why(error)}") from error

    def healthy(self) -> bool:
        """Whether /health answers 200. Not an error when nothing listens yet."""
        try:
            return self._get("/health").status_code == 200
        except ApiError:
            return False

    def server_info(self) -> dict[str, Any]:
        response = self._get("/server_info")
        if response.status_code != 200:
            raise ApiError(f"GET {self.base}/server_info: HTTP {response.status_code}")
        try:
            found = response.json()
        except ValueError as error:
            raise ApiError(f"GET {self.base}/server_info: not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ApiError(f"GET {self.base}/server_info: not an object")
        return found

    def generated_tokens(self, names: tuple[str, ...]) -> float | None:
        """The sum of the counters that grow with every token; None when there are none of these names."""
        response = self._get("/metrics")
        if response.status_code != 200:
            return None
        values = []
        for line in response.text.splitlines():
            match = _COUNTER.match(line)
            if match and match["name"] in names:
                values.append(float(match["value"]))
        return sum(values) if values else None

    def complete(self, deadline_s: float) -> Completion:
        """An unconstrained greedy answer to a prompt that nobody has asked before."""
        prompt = f"Say the word {secrets.token_hex(6)} and count from one to five."
        body = {
            "model": self._model(), "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": _NONCE_TOKENS,
        }  # fmt: skip
        try:
            response = self._client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(deadline_s, connect=_SHORT_S))
        except httpx.HTTPError as error:
            raise ApiError(f"POST {self.base}/v1/chat/completions: {_why(error)}") from error
        if response.status_code != 200:
            raise ApiError(f"POST {self.base}/v1/chat/completions: HTTP {response.status_code}: {response.text[:300]}")
        try:
            found = response.json()
            choice = found["choices"][0]
            text = choice["message"]["content"] or choice["message"].get("reasoning_content") or ""
            return Completion(text, choice["finish_reason"] or "", found.get("system_fingerprint") or "",
                              hashlib.sha256(prompt.encode()).hexdigest()[:8], response.elapsed.total_seconds())  # fmt: skip
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ApiError(f"POST {self.base}/v1/chat/completions: not a chat completion: {error!r}") from error

    def _model(self) -> str:
        response = self._get("/v1/models")
        try:
            return str(json.loads(response.text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ApiError(f"GET {self.base}/v1/models: names no model: {error!r}") from error


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def degenerate(text: str) -> str:
    """Why this text is no answer; empty when it may be one.

    A judge of form alone: nothing, or one character over and over, which is what logits that are not numbers decode
    to. It cannot see fluent nonsense, and it lets undecodable bytes pass, since a model of random weights writes them.
    """
    stripped = text.strip()
    if not stripped:
        return "the answer is empty"
    if len(stripped) >= 16 and len(set(stripped)) == 1 and stripped[0] != "\ufffd":
        return f"the answer is one character, {stripped[0]!r}, {len(stripped)} times"
    return ""
