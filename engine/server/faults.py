"""/admin/faults: drills armed and disarmed at run time. What they are and do is the scheduler's business.

Nothing here is logged: a fault must be found by its effects.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.messages import FaultAnswer
from engine.server.errors import ApiError
from engine.server.generation import read_body
from engine.server.json_response import JsonResponse
from engine.server.protocol import FaultRequest, decode
from engine.server.service import Service

_ANSWER_TIMEOUT_S = 10.0
_MOST_BODY_BYTES = 16 * 2**10


async def faults(service: Service, request: Request) -> Response:
    """GET: ``{"armed": [...]}`` as last heard. POST ``{"fault": "NAME[:key=value,...]"}`` arms one. DELETE disarms
    ``?name=NAME``, or all.

    Raises:
        ApiError: 401 or 403 without the right; 400 when the scheduler will not; 504 when it does not answer.
    """
    service.keys.check_admin(request)
    if not service.keys.faults_enabled:
        raise ApiError(403, "faults are off; start with --enable-faults", code="faults_disabled")
    if request.method == "GET":
        return JsonResponse({"armed": list(service.link.armed)})
    spec = decode(await read_body(request, _MOST_BODY_BYTES), FaultRequest).fault if request.method == "POST" else ""
    service.serving()
    try:
        if spec:
            return _shown(await service.link.set_fault(spec, timeout_s=_ANSWER_TIMEOUT_S))
        return _shown(await service.link.clear_fault(request.query_params.get("name", ""), timeout_s=_ANSWER_TIMEOUT_S))
    except TimeoutError:
        text = f"the scheduler did not answer within {_ANSWER_TIMEOUT_S:.0f} s; it may still do as told when it reads this"
        raise ApiError(504, text, code="scheduler_silent") from None


def _shown(answer: FaultAnswer) -> Response:
    if not answer.ok:
        raise ApiError(400, answer.message, code="fault_refused", param="fault")
    body: dict[str, Any] = {"message": answer.message, "armed": answer.armed}
    return JsonResponse(body)
