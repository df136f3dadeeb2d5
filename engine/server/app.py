"""The routes, and the frame around every exchange: its id, its key, its metrics, the shape of its errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server import chat, completions, describe, health
from engine.server.boxes import read_ranks
from engine.server.errors import ApiError, ClientGone
from engine.server.faults import faults
from engine.server.generation import generate
from engine.server.identity import request_id
from engine.server.json_response import JsonResponse
from engine.server.rank_metrics import RankCollector
from engine.server.service import Service

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("/v1/chat/completions", ("POST",), "API", "an answer to a conversation, whole or streamed: text, JSON, tool calls"),
    ("/v1/completions", ("POST",), "API", "a text that goes on from a prompt or a list of prompts, whole or streamed"),
    ("/v1/models", ("GET",), "API", "the one model that is served"),
    ("/v1/models/{name:path}", ("GET",), "API", "the same by its name; 404 for another"),
    ("/tokenize", ("POST",), "API", "ids of a `prompt`, or of `messages` through the chat template"),
    ("/server_info", ("GET",), "API", "version, declared settings and their digest, invocation, every rank with its own digest, what runs"),
    ("/health", ("GET",), "", "see below"),
    ("/health_generate", ("GET",), "", "see below"),
    ("/health_scheduler", ("GET",), "", "see below"),
    ("/metrics", ("GET",), "", "Prometheus' text format; see below"),
    ("/admin/faults", ("GET", "POST", "DELETE"), "admin", 'what is armed; arm `{"fault": SPEC}`; disarm `?name=NAME` or all'),
)
"""Path, methods, which key it needs where one is configured, what it is for."""

HEALTH_ROUTES: tuple[tuple[str, str], ...] = (
    ("/health", "200 as soon as this process answers, 503 from SIGTERM on; says nothing of the scheduler"),
    ("/health_generate", "200 when one token came within --health-generate-timeout, else 503 with the reasons"),
    (
        "/health_scheduler",
        "200 when every rank's black box is fresh and its process alive, else 503 with the reasons; `loading` until then",
    ),
)
"""For the reference page."""


def build(service: Service) -> ASGIApp:
    """The application. What it serves is in ``service``; starting and stopping is ``main``'s."""
    settings = service.settings
    collector = RankCollector(
        lambda: read_ranks(service.run_directory, settings.parallel.tp),
        model_name=service.identity.served_name, page_size=settings.cache.page_size,
    )  # fmt: skip
    service.meters.registry.register(collector)
    link = service.link
    service.meters.watch(in_flight=lambda: link.in_flight, ready=lambda: float(service.status == "ready"), throughput=link.tokens_per_s)

    def client(handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            service.keys.check_client(request)
            return await handler(request)

        return checked

    async def chat_completions(request: Request) -> Response:
        return await generate(service, request, chat.admit)

    async def plain_completions(request: Request) -> Response:
        return await generate(service, request, completions.admit)

    async def models(request: Request) -> Response:
        return describe.models(service)

    async def model(request: Request) -> Response:
        return describe.model(service, request.path_params["name"])

    async def tokenize(request: Request) -> Response:
        return await describe.tokenize(service, request)

    async def server_info(request: Request) -> Response:
        return describe.server_info(service)

    async def process_health(request: Request) -> Response:
        return health.process_health(service)

    async def generate_health(request: Request) -> Response:
        return await health.generate_health(service, request)

    async def scheduler_health(request: Request) -> Response:
        return health.scheduler_health(service)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(service.meters.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def admin_faults(request: Request) -> Response:
        return await faults(service, request)

    handlers: dict[str, Handler] = {
        "/v1/chat/completions": client(chat_completions),
        "/v1/completions": client(plain_completions),
        "/v1/models": client(models),
        "/v1/models/{name:path}": client(model),
        "/tokenize": client(tokenize),
        "/server_info": client(server_info),
        "/health": process_health,
        "/health_generate": generate_health,
        "/health_scheduler": scheduler_health,
        "/metrics": metrics,
        "/admin/faults": admin_faults,
    }
    routes = [Route(path, handlers[path], methods=list(methods)) for path, methods, _, _ in ROUTES]

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        service.meters.refused(error)
        return JsonResponse(error.body(), status_code=error.status, headers=error.headers())

    async def http_refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        phrase = HTTPStatus(error.status_code).phrase.lower()
        shaped = ApiError(error.status_code, f"{phrase}: {request.method} {request.url.path}", code=phrase.replace(" ", "_"))
        service.meters.refused(shaped)
        return JsonResponse(shaped.body(), status_code=error.status_code, headers=dict(error.headers or {}))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def broken(request: Request, error: Exception) -> Response:
        shaped = ApiError(500, "an internal error; the server's log has it under this x-request-id", code="internal_error")
        service.meters.refused(shaped)
        return JsonResponse(shaped.body(), status_code=500)

    app = Starlette(
        routes=routes,
        exception_handlers={ApiError: refused, HTTPException: http_refused, ClientGone: gone, 500: broken},
    )
    app.router.redirect_slashes = False  # a redirected POST is lost on many clients; and an error has one shape
    return Exchange(app, service, frozenset(route.path for route in routes))


class Exchange:
    """ASGI middleware around every exchange: gives it an id, answers with it, measures it."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = dict(scope["headers"])
        rid = request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        scope.setdefault("state", {})["rid"] = rid
        status = 499

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", rid.encode())]
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except Exception:
            log.exception("rid=%s: an internal error", rid)
        finally:
            meters = self._service.meters
            path = scope["path"]
            route = path if path in self._paths else "/v1/models/{name}" if path.startswith("/v1/models/") else "other"
            meters.requests.labels(route, status).inc()
            meters.duration.labels(route).observe(time.monotonic() - started)
