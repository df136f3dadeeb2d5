"""What a client is told when it does not get an answer: one exception, one JSON shape (OpenAI's)."""

from __future__ import annotations

from typing import Any

GRAMMAR_OFF = (
    "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported "
    "when the server is launched with --grammar-backend none"
)
"""SGLang's own text, so that clients and monitors that know one server know the other."""

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200.

    ``code`` is a short fixed word: clients branch on it and ``lastbatch:refused_requests_total`` counts by it.
    ``param`` names the parameter at fault, if it is one parameter. ``retry_after_s`` becomes the header.
    """

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None, kind: str = "", retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}


def bad(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400 for a value that cannot be used."""
    return ApiError(400, message, code=code, param=param)


class ClientGone(Exception):
    """The client closed its connection; there is nobody left to answer."""
