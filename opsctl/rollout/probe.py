"""Talking to the served API as a client: health, server information, counters, any request, a completion with a nonce."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from opsctl import cut
from opsctl.callers.request import prompt_sha
from opsctl.rollout import reply
from opsctl.rollout.reply import Reply

_SHORT_S = 5.0
_NONCE_TOKENS = 24
OWN_RID = "opsctl-"
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
    rid: str = ""


class Api:
    """An OpenAI-shaped API at ``base``. Raises ApiError from every method but ``ask``.

    Each request for tokens bears a request id that begins with ``OWN_RID``, so that an access log tells it from clients'.
    """

    def __init__(self, base: str, key: str = "", user_agent: str = "") -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= {"User-Agent": user_agent} if user_agent else {}
        self.base = base.rstrip("/").removesuffix("/v1")
        self._client = cut.client(self.base, headers)

    def close(self) -> None:
        self._client.close()

    def _get(self, route: str) -> httpx.Response:
        try:
            with cut.at_most(_SHORT_S) as limit:
                return self._client.get(route, timeout=_SHORT_S, extensions=limit.extensions)
        except httpx.HTTPError as error:
            raise ApiError(f"GET {self.base}{route}: {_why(error)}") from error

    def healthy(self) -> bool:
        """Whether /health answers 200. Not an error when nothing listens yet."""
        try:
            return self._get("/health").status_code == 200
        except ApiError:
            return False

    def info(self, routes: Sequence[str] = ("/server_info",)) -> dict[str, Any] | None:
        """What the server tells of its settings, by the first route that it has; None when it has none of them."""
        for route in routes:
            response = self._get(route)
            if response.status_code == 404:
                continue
            if response.status_code != 200:
                raise ApiError(f"GET {self.base}{route}: HTTP {response.status_code}")
            try:
                found = response.json()
            except ValueError as error:
                raise ApiError(f"GET {self.base}{route}: not JSON: {error}") from error
            if not isinstance(found, dict):
                raise ApiError(f"GET {self.base}{route}: not an object")
            return found
        return None

    def server_info(self) -> dict[str, Any]:
        found = self.info()
        if found is None:
            raise ApiError(f"GET {self.base}/server_info: HTTP 404")
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
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": _NONCE_TOKENS}
        found = self.ask({"model": self.model(), **body}, deadline_s)
        if found.why or found.status != 200:
            status = f"HTTP {found.status}: " if found.status not in (0, 200) else ""
            raise ApiError(f"POST {self.base}/v1/chat/completions: {status}{found.why}")
        return Completion(found.text, found.finish, found.fingerprint, prompt_sha(body), found.seconds, found.rid)

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> Reply:
        """Send a body of either route, whole or streamed, as it is but for the model, which is filled in where it names
        none. Whatever happens is in the reply."""
        route = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        start, rid = time.monotonic(), f"{OWN_RID}{secrets.token_hex(6)}"
        try:
            body = dict(request) if request.get("model") else {**request, "model": self.model()}
            timeout = httpx.Timeout(deadline_s, connect=_SHORT_S)
            with (
                cut.at_most(deadline_s) as limit,
                self._client.stream("POST", route, json=body, headers={"X-Request-Id": rid}, timeout=timeout,
                                    extensions=limit.extensions) as response,
            ):  # fmt: skip
                if response.status_code == 200 and body.get("stream"):
                    found = reply.streamed(response.iter_lines())
                    return dataclasses.replace(found, seconds=time.monotonic() - start, rid=rid)
                content = response.read()
                return dataclasses.replace(reply.whole(response.status_code, content, time.monotonic() - start), rid=rid)
        except httpx.HTTPError as error:
            return Reply(0, seconds=time.monotonic() - start, why=_why(error))
        except ApiError as error:
            return Reply(0, seconds=time.monotonic() - start, why=str(error))

    def context_length(self) -> int:
        """In tokens, as /v1/models tells it; 0 when it does not."""
        try:
            found = json.loads(self._get("/v1/models").text)["data"][0]
            return int(found.get("max_model_len") or 0)
        except (ValueError, LookupError, TypeError, AttributeError):
            return 0

    def model(self) -> str:
        response = self._get("/v1/models")
        try:
            return str(json.loads(response.text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ApiError(f"GET {self.base}/v1/models: names no model: {error!r}") from error


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
