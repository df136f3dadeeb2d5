"""A client for people who enforce structure themselves: it believes no answer that it has not checked.

    client = Client("http://127.0.0.1:30000", model="flash")
    order = client.json([{"role": "user", "content": "..."}], schema=ORDER)

It sends ``response_format`` as long as the server takes it, and holds every answer against the schema whether the server
did or not. On the one 400 that says that the server was launched with ``--grammar-backend none`` it asks once more without,
and remembers that for this server until the process ends. It parses and repairs nothing: an answer that is not exactly one
JSON value that fits is an exception. It speaks to the host that it was given and follows no redirect; a second host is asked
only when ``fallback_base_url`` names it, and then a counter and a log line say so. No prompt and no answer is ever logged.

``AsyncClient`` is the same for asyncio. Neither imports torch or the server.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

import httpx
import jsonschema
import jsonschema.protocols
import referencing
import referencing.exceptions
from prometheus_client import Counter

log = logging.getLogger(__name__)

GRAMMAR_OFF = "is not supported when the server is launched with --grammar-backend none"
"""The end of SGLang's text, which the bundled engine says too. No other 400 is asked again."""

FALLBACKS = Counter("lastbatch_client_fallbacks", "Answers taken from the fallback host.", ["reason"])
REFUSALS = Counter("lastbatch_client_grammar_refusals", "Servers found to refuse response_format.")
INVALID = Counter("lastbatch_client_invalid_answers", "Answers that were not what was asked for.", ["reason"])

Message = Mapping[str, Any]


class ClientError(Exception):
    """There is no answer that may be used. The text holds no prompt and no answer."""


class NoConnection(ClientError):
    """The host did not answer: refused, reset, timed out."""


class StatusError(ClientError):
    """An HTTP status other than 200, with what the server said of it in OpenAI's shape or SGLang's flat one."""

    def __init__(self, status: int, message: str, *, code: str = "", kind: str = "", param: str = "", host: str = "") -> None:
        super().__init__(f"{host}: HTTP {status}: {message}")
        self.status, self.message, self.code, self.kind, self.param, self.host = status, message, code, kind, param, host


class InvalidAnswer(ClientError):
    """The server answered, and not with what was asked for. ``text`` is what it said, for the caller alone: log it nowhere.
    ``reason``: ``empty``, ``truncated``, ``not_json``, ``schema``, ``refused`` or ``not_a_completion``."""

    def __init__(self, reason: str, message: str, text: str = "") -> None:
        super().__init__(message)
        self.reason, self.text = reason, text


class BadSchema(ClientError, ValueError):
    """The schema itself cannot be used: it is none, or it refers to another document, which is not fetched."""


@dataclass(frozen=True)
class Answer:
    """``served_by`` is the base URL that answered; ``constrained``: the server was asked to enforce the form."""

    text: str
    finish_reason: str
    served_by: str
    constrained: bool
    system_fingerprint: str
    value: Any = None


@dataclass(frozen=True)
class _Host:
    base: str
    key: str
    model: str

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


# One try: the host and the body to send there; what comes back is a response, or why there is none.
_Talk = Generator[tuple[_Host, dict[str, Any]], httpx.Response | httpx.HTTPError, Answer]

_refusing: set[str] = set()  # servers that refuse response_format, for the life of the process


def forget() -> None:
    """Ask every server again whether it takes response_format, as a new process would."""
    _refusing.clear()


class _Core:
    """What both clients do, without sending anything."""

    def __init__(
        self, base_url: str, *, model: str, api_key: str = "", timeout_s: float = 120.0,
        fallback_base_url: str = "", fallback_api_key: str = "", fallback_model: str = "",
    ) -> None:  # fmt: skip
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url: {base_url!r} is no URL; there is no default host, say where the server is")
        self._hosts = [_Host(_base(base_url), api_key, model)]
        if fallback_base_url:
            self._hosts.append(_Host(_base(fallback_base_url), fallback_api_key, fallback_model or model))
        self._timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0))

    def _talk(self, messages: Sequence[Message], schema: Any, more: Mapping[str, Any]) -> _Talk:
        """``schema`` None: any text will do. Raises ClientError."""
        if clash := {"messages", "model", "response_format", "stream"}.intersection(more):
            raise TypeError(f"{', '.join(sorted(clash))}: given by the client itself")
        check = None if schema is None else _validator(schema)
        form = {} if schema is None else {"response_format": _response_format(schema)}
        for at, host in enumerate(self._hosts):
            body = {**more, "messages": list(messages), "model": host.model}
            asked = {} if host.base in _refusing else form
            got = yield host, {**body, **asked}
            if asked and _is_grammar_off(got):
                _refusing.add(host.base)
                REFUSALS.inc()
                log.warning("%s refuses response_format (--grammar-backend none); answers are checked here only", host.base)
                asked = {}
                got = yield host, body
            last = at + 1 == len(self._hosts)
            reason = _unusable(got)
            if reason and not last:
                FALLBACKS.labels(reason).inc()
                log.warning("%s: %s; asking the fallback %s instead", host.base, reason, self._hosts[at + 1].base)
                continue
            if not isinstance(got, httpx.Response):
                raise NoConnection(f"{host.base}: {type(got).__name__}") from got
            return _checked(got, host, check, constrained=bool(asked))
        raise AssertionError("unreachable")


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _unusable(got: httpx.Response | httpx.HTTPError) -> str:
    """Why another host may be asked: nobody answers here, or the server says that it cannot. A 4xx is an answer."""
    if isinstance(got, httpx.TimeoutException):
        return "timeout"
    if isinstance(got, httpx.HTTPError):
        return "no_connection"
    return f"http_{got.status_code}" if got.status_code >= 500 else ""


def _is_grammar_off(got: httpx.Response | httpx.HTTPError) -> bool:
    return isinstance(got, httpx.Response) and got.status_code == 400 and GRAMMAR_OFF in _error(got, "").message


def _error(response: httpx.Response, host: str) -> StatusError:
    try:
        found = response.json()
    except ValueError:
        return StatusError(response.status_code, "(no JSON)", host=host)
    inner = found.get("error", found) if isinstance(found, dict) else {}
    inner = inner if isinstance(inner, dict) else {"message": inner}
    message, code, kind, param = (str(inner.get(name) or "") for name in ("message", "code", "type", "param"))
    return StatusError(response.status_code, message or "(no message)", code=code, kind=kind, param=param, host=host)


def _checked(response: httpx.Response, host: _Host, check: jsonschema.protocols.Validator | None, *, constrained: bool) -> Answer:
    if response.status_code != 200:
        raise _error(response, host.base)
    try:
        found = response.json()
        choice = found["choices"][0]
        text, finish = choice["message"].get("content") or "", str(choice.get("finish_reason") or "")
        refusal, fingerprint = choice["message"].get("refusal"), str(found.get("system_fingerprint") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        _invalid("not_a_completion", f"{host.base}: HTTP 200 and no chat completion")
    if refusal:
        _invalid("refused", f"{host.base}: the model refused", str(refusal))
    if not isinstance(text, str) or not text.strip():
        _invalid("empty", f"{host.base}: an answer without text (finish_reason {finish or 'missing'})")
    value = None if check is None else _value(text, finish, check, host.base)
    return Answer(text, finish, host.base, constrained, fingerprint, value)


def _value(text: str, finish: str, check: jsonschema.protocols.Validator, host: str) -> Any:
    """The one JSON value that the text is. Raises InvalidAnswer."""
    if finish == "length":
        _invalid("truncated", f"{host}: the answer was cut off by its token limit", text)
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        _invalid("not_json", f"{host}: the answer is not one JSON value{where}", text)
    try:
        wrong = next(check.iter_errors(value), None)
    except (referencing.exceptions.Unresolvable, RecursionError) as error:
        raise BadSchema(f"the schema refers to what is not in it ({type(error).__name__}); nothing is fetched") from error
    if wrong is not None:
        _invalid("schema", f"{host}: the answer breaks its schema at {wrong.json_path} ({wrong.validator})", text)
    return value


def _invalid(reason: str, message: str, text: str = "") -> NoReturn:
    INVALID.labels(reason).inc()
    raise InvalidAnswer(reason, message, text) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice: readers disagree on which of them counts")
    return found


def _validator(schema: Any) -> jsonschema.protocols.Validator:
    """Raises BadSchema."""
    if not isinstance(schema, dict | bool):
        raise BadSchema("a JSON schema is an object, true or false")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)  # type: ignore[arg-type]  # true and false are schemas too
    except jsonschema.SchemaError as error:
        raise BadSchema(f"the schema is none at {error.json_path}: {error.validator}") from error
    return kind(schema, registry=referencing.Registry())


def _response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


class Client(_Core):
    """Keep one for many requests; ``close`` it, or use it as a context manager. Raises ClientError from every request."""

    def __init__(self, base_url: str, *, model: str, **how: Any) -> None:
        super().__init__(base_url, model=model, **how)
        self._http = httpx.Client(timeout=self._timeout, trust_env=False, follow_redirects=False)

    def text(self, messages: Sequence[Message], **more: Any) -> Answer:
        """Any answer that is not empty. ``more`` goes into the request."""
        return self._drive(self._talk(messages, None, more))

    def json(self, messages: Sequence[Message], schema: Any, **more: Any) -> Any:
        """A value that fits the schema."""
        return self.ask(messages, schema, **more).value

    def ask(self, messages: Sequence[Message], schema: Any, **more: Any) -> Answer:
        """The same, with who answered and how."""
        return self._drive(self._talk(messages, schema, more))

    def _drive(self, talk: _Talk) -> Answer:
        try:
            host, body = next(talk)
            while True:
                host, body = talk.send(self._send(host, body))
        except StopIteration as done:
            found: Answer = done.value
            return found

    def _send(self, host: _Host, body: Mapping[str, Any]) -> httpx.Response | httpx.HTTPError:
        try:
            return self._http.post(f"{host.base}/v1/chat/completions", json=body, headers=host.headers())
        except httpx.HTTPError as error:
            return error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncClient(_Core):
    """``Client`` for asyncio; ``aclose`` it, or use it as an asynchronous context manager."""

    def __init__(self, base_url: str, *, model: str, **how: Any) -> None:
        super().__init__(base_url, model=model, **how)
        self._http = httpx.AsyncClient(timeout=self._timeout, trust_env=False, follow_redirects=False)

    async def text(self, messages: Sequence[Message], **more: Any) -> Answer:
        return await self._drive(self._talk(messages, None, more))

    async def json(self, messages: Sequence[Message], schema: Any, **more: Any) -> Any:
        return (await self.ask(messages, schema, **more)).value

    async def ask(self, messages: Sequence[Message], schema: Any, **more: Any) -> Answer:
        return await self._drive(self._talk(messages, schema, more))

    async def _drive(self, talk: _Talk) -> Answer:
        try:
            host, body = next(talk)
            while True:
                host, body = talk.send(await self._send(host, body))
        except StopIteration as done:
            found: Answer = done.value
            return found

    async def _send(self, host: _Host, body: Mapping[str, Any]) -> httpx.Response | httpx.HTTPError:
        try:
            return await self._http.post(f"{host.base}/v1/chat/completions", json=body, headers=host.headers())
        except httpx.HTTPError as error:
            return error

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()
