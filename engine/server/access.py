"""One log line for each request for tokens: who, what shape, how it ended. Never text of a prompt or an answer.

``req rid=<id> caller=<8> shape=<text|json|tool|grammar> prompt_sha=<8> status=<code> in=<n> out=<n> finish=<reason>``

``caller`` is the first 8 hex digits of the SHA-256 of the API key, or of the user agent where no key was sent.
``prompt_sha`` is defined in ``identity.prompt_sha``; both are ``-`` where there is nothing to hash. ``finish`` is
OpenAI's reason, or ``refused``, ``error`` or ``disconnect``. After the first two comes ``reason=<code of the error>``.
A request is refused before it generates, and fails while it does.
"""

from __future__ import annotations

import hashlib
import logging

from starlette.requests import Request

from engine.server.errors import ApiError

log = logging.getLogger("engine.server.access")


class Record:
    """Filled in as a request goes its way; ``close`` writes the line, once."""

    def __init__(self, request: Request) -> None:
        self.rid: str = request.state.rid
        self.shape = "-"
        self.prompt_sha = "-"
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._caller = _caller(request)
        self.open = True

    def close(self, status: int, finish: str, reason: str = "") -> None:
        if not self.open:
            return
        self.open = False
        log.info(
            "req rid=%s caller=%s shape=%s prompt_sha=%s status=%d in=%d out=%d finish=%s%s",
            self.rid, self._caller, self.shape, self.prompt_sha, status, self.prompt_tokens, self.completion_tokens, finish,
            f" reason={reason}" if reason else "",
        )  # fmt: skip

    def refused(self, error: ApiError) -> None:
        self.close(error.status, "refused", error.code)

    def failed(self, error: ApiError) -> None:
        self.close(error.status, "error", error.code)


def _caller(request: Request) -> str:
    sent = request.headers.get("authorization") or request.headers.get("user-agent")
    if not sent:
        return "-"
    key = sent.partition(" ")[2].strip() if sent.lower().startswith("bearer ") else sent
    return hashlib.sha256(key.encode()).hexdigest()[:8]
