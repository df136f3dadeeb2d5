"""From a request for tokens to its response, for both routes: admit, send, wait, answer, and account for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.server.access import Record
from engine.server.answer import Delta, Job
from engine.server.errors import ApiError, ClientGone
from engine.server.flight import SCHEDULER_REFUSED, Flight
from engine.server.json_response import JsonResponse
from engine.server.service import Service
from engine.server.size import body_bytes
from engine.server.streaming import DONE, EventStream, event, unless_gone

Admit = Callable[[Service, bytes, Record], Awaitable[Job]]
BODY_TIMEOUT_S = 60.0
_REFUSAL_GRACE_S = 2.0


async def generate(service: Service, request: Request, admit: Admit) -> Response:
    """Answer one request.

    The headers of a stream wait for the first token, so that what the scheduler refuses (a schema that does not
    compile) is still a 400; but no longer than a compile may take, for a queue may be longer than a proxy is patient.

    Raises:
        ApiError: refused, or failed before anything was sent.
        ClientGone: the client left before anything was sent.
    """
    record = Record(request)
    job: Job | None = None
    try:
        ready = service.serving()
        job = await admit(service, await read_body(request, body_bytes(ready)), record)
        flight = Flight(service.link, job.requests, service.meters)
        if job.stream:
            return await _stream(service, request, job, flight, record)
        with flight:
            await unless_gone(request, _collect(job, flight))
    except ApiError as error:
        record.completion_tokens = _used(job)
        if job is None or error.code == SCHEDULER_REFUSED:
            record.refused(error)
        else:
            record.failed(error)
        raise
    except ClientGone:
        record.completion_tokens = _used(job)
        _left(service, record)
        raise
    except BaseException:
        record.close(500, "error", "internal_error")
        raise
    _account(job, record)
    head = _head(service, record, job, job.answer.object_name)
    return JsonResponse({**head, "choices": job.answer.whole(), "usage": job.usage()})


async def read_body(request: Request, most_bytes: int, *, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The body, of ``most_bytes`` at most; one that says it is larger is not read at all.

    Raises:
        ApiError: 408 or 413: it did not arrive in time, or is too large.
        ClientGone: the client left in the middle of it.
    """
    parts: list[bytes] = []
    size = 0
    too_large = ApiError(413, f"the body is larger than {most_bytes} bytes", code="body_too_large")
    said = request.headers.get("content-length", "0")  # digits: the HTTP parser lets nothing else through
    if len(said) > 15 or int(said) > most_bytes:
        raise too_large
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


async def _stream(service: Service, request: Request, job: Job, flight: Flight, record: Record) -> Response:
    flight.start()
    try:
        await unless_gone(request, flight.peek(service.settings.grammar.compile_timeout_s + _REFUSAL_GRACE_S))
    except BaseException:
        flight.close()
        raise

    def ended() -> None:
        flight.close()
        record.completion_tokens = _used(job)
        if record.open:  # nobody reads any more
            _left(service, record)

    return EventStream(_chunks(service, job, flight, record), ended)


async def _collect(job: Job, flight: Flight) -> None:
    async for _ in _deltas(job, flight):
        pass


async def _deltas(job: Job, flight: Flight) -> AsyncGenerator[Delta, None]:
    while flight.open:
        index, message = await flight.next()
        for delta in job.answer.feed(index, message):
            yield delta
        if job.answer.ended(index):
            flight.stop(index)


async def _chunks(service: Service, job: Job, flight: Flight, record: Record) -> AsyncGenerator[bytes, None]:
    head = _head(service, record, job, job.answer.chunk_name)
    tail: dict[str, Any] = {"usage": None} if job.include_usage else {}

    def chunk(delta: Delta) -> bytes:
        choice: dict[str, Any] = {"index": delta.index, **delta.body, "finish_reason": delta.finish}
        if delta.finish:
            choice["matched_stop"] = delta.matched
        return event({**head, "choices": [choice], **tail})

    try:
        for delta in job.answer.opening():
            yield chunk(delta)
        async for delta in _deltas(job, flight):
            yield chunk(delta)
        if job.include_usage:
            yield event({**head, "choices": [], "usage": job.usage()})
        _account(job, record)  # before the end is sent: whoever has read it may be gone at once
        yield DONE
    except ApiError as error:
        service.meters.refused(error)
        record.completion_tokens = _used(job)
        record.failed(error)
        yield event(error.body())
    except Exception:
        record.close(500, "error", "internal_error")
        raise


def _head(service: Service, record: Record, job: Job, object_name: str) -> dict[str, Any]:
    return {
        "id": job.id_prefix + record.rid,
        "object": object_name,
        "created": int(time.time()),
        "model": service.identity.served_name,
        "system_fingerprint": service.identity.fingerprint,
    }


def _used(job: Job | None) -> int:
    """Tokens generated so far; none for a request that was not admitted."""
    return sum(choice.used for choice in job.answer.choices) if job is not None else 0


def _account(job: Job, record: Record) -> None:
    record.completion_tokens = _used(job)
    record.close(200, job.answer.finish_reason(0))


def _left(service: Service, record: Record) -> None:
    service.meters.disconnected.inc()
    record.close(499, "disconnect")
