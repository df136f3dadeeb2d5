"""Routes that say what is served, and the tokenizer's."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from msgspec import to_builtins
from starlette.requests import Request
from starlette.responses import Response

from engine.server.admission import off_loop_if_long
from engine.server.boxes import read_ranks
from engine.server.chat import prompt_of
from engine.server.errors import bad
from engine.server.generation import read_body
from engine.server.json_response import JsonResponse
from engine.server.protocol import TokenizeRequest, decode
from engine.server.service import Service
from engine.server.size import body_bytes, check_characters


def models(service: Service) -> Response:
    return JsonResponse({"object": "list", "data": [_model(service)]})


def model(service: Service, name: str) -> Response:
    service.check_model(name)
    return JsonResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    ready = service.link.ready
    return {
        "id": service.identity.served_name,
        "object": "model",
        "created": service.identity.created,
        "owned_by": "lastbatch",
        "max_model_len": ready.context_length if ready else None,
    }


def server_info(service: Service) -> Response:
    """Flags and ranks as they are: each rank's digest comes from its own black box where that can be read."""
    ready = service.link.ready
    ranks: dict[int, dict[str, Any]] = {}
    for info in ready.ranks if ready else ():
        ranks[info.rank] = {name: getattr(info, name) for name in info.__struct_fields__}
    for reading in read_ranks(service.run_directory, service.settings.parallel.tp):
        if reading.snapshot is not None:
            header = reading.snapshot.header
            names = ("rank", "dp", "pp", "tp", "ep", "node", "pid", "config_digest")
            ranks[header.rank] = {name: getattr(header, name) for name in names}
    return JsonResponse({
        "version": service.identity.version,
        "runtime": {"python": platform.python_version(), **{name: _installed(name) for name in ("torch", "xgrammar")}},
        "status": service.status,
        "model": service.identity.served_name,
        "config": service.settings.declared(),
        "config_digest": service.identity.config_digest,
        "invocation_id": service.identity.invocation_id,
        "system_fingerprint": service.identity.fingerprint,
        "sampling_defaults": to_builtins(service.sampling),
        "ranks": [ranks[rank] for rank in sorted(ranks)],
        "paths": ready.paths if ready else {},
        "context_length": ready.context_length if ready else None,
        "vocab_size": ready.vocab_size if ready else None,
        "pool_tokens": ready.pool_tokens if ready else None,
    })  # fmt: skip


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


async def tokenize(service: Service, request: Request) -> Response:
    """``prompt``, or ``messages`` through the chat template, to ids.

    Raises:
        ApiError: 400: both or neither, or more text than the context could hold; 503 before that is known.
    """
    ready = service.serving()
    asked = decode(await read_body(request, body_bytes(ready)), TokenizeRequest)
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise bad("prompt: give either prompt or messages", param="prompt")
    if asked.messages is not None:
        if not asked.messages:
            raise bad("messages: empty", param="messages")
        _, ids = await prompt_of(service, asked.messages, asked.tools, asked.chat_template_kwargs)
    else:
        text = asked.prompt or ""
        check_characters(ready, len(text), service.longest_token, param="prompt")
        ids = await off_loop_if_long(len(text), lambda: service.tokenizer.encode(text, add_special=asked.add_special_tokens))
    return JsonResponse({"tokens": ids, "count": len(ids), "max_model_len": ready.context_length})
