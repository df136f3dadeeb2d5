"""Three questions about health, and what each answer does not say.

``/health``             does this process answer? Says nothing of the scheduler or the model. 503 from SIGTERM on.
``/health_generate``    does a token come out, within ``--health-generate-timeout``? Slow behind a long prefill.
``/health_scheduler``   is every rank's black box fresh and its process alive? No inference; says nothing of the answers.
                        While it loads it says so, with 503.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.messages import Generate, Sampling
from engine.server.boxes import RankReading, faults_of, is_dead, read_ranks
from engine.server.errors import ApiError
from engine.server.flight import Flight
from engine.server.json_response import JsonResponse
from engine.server.service import Service

_LIE = "health.lie"


def process_health(service: Service) -> Response:
    lied = any(spec.partition(":")[0] == _LIE for spec in service.link.armed)
    if service.draining and not lied:
        return JsonResponse({"status": service.status}, status_code=503)
    return JsonResponse({"status": "ready" if lied else service.status})


async def generate_health(service: Service, request: Request) -> Response:
    """One greedy token from a probe that is cleaned up however it ends."""
    service.serving()
    prompt = service.tokenizer.encode("Hello") or [0]
    probe = Generate(
        rid=service.link.unique(f"health-{request.state.rid}"),
        input_ids=prompt,
        sampling=Sampling(seed=0, max_tokens=1, temperature=0.0, ignore_eos=True),
        probe=True,
    )
    limit = service.settings.server.health_generate_timeout_s
    started = time.monotonic()
    with Flight(service.link, [probe], service.meters) as flight:
        try:
            async with asyncio.timeout(limit):
                while flight.open:
                    await flight.next()
        except TimeoutError:
            return JsonResponse({"status": "failed", "reasons": [f"no token within {limit:g} s"]}, status_code=503)
        except ApiError as error:
            return JsonResponse({"status": "failed", "reasons": [error.message]}, status_code=503)
    return JsonResponse({"status": "ready", "seconds": round(time.monotonic() - started, 4)})


def scheduler_health(service: Service) -> Response:
    limit = service.settings.server.health_max_age_s
    now_ns = time.monotonic_ns()
    readings = read_ranks(service.run_directory, service.settings.parallel.tp)
    reasons = [reason for reading in readings for reason in faults_of(reading, now_mono_ns=now_ns, max_age_s=limit)]
    status = "failed" if reasons else "ready"
    if service.link.ready is None:
        reasons.append("loading: the scheduler has not said that it is ready")
        # A rank that loads has no box yet, or an old record; only its death is a failure.
        status = "failed" if any(is_dead(reading) for reading in readings) else "loading"
    body = {"status": status, "reasons": reasons, "ranks": [_shown(reading, now_ns) for reading in readings]}
    return JsonResponse(body, status_code=503 if reasons else 200)


def _shown(reading: RankReading, now_ns: int) -> dict[str, Any]:
    """A rank's load as routers want it."""
    box = reading.snapshot
    if box is None:
        return {"rank": reading.rank, "missing": reading.reason}
    return {
        "rank": reading.rank,
        "pid": box.header.pid,
        "node": box.header.node,
        "phase": box.host.phase.name,
        "step": box.host.step,
        "record_age_s": round(box.age_s(now_ns), 3),
        "progress_age_s": round((now_ns - box.host.progress_ns) / 1e9, 3),
        "running": box.host.running,
        "waiting": box.host.waiting,
        "held": box.host.held,
        "pages_free": box.host.counters["pages_free"],
        "pages_total": box.host.counters["pages_total"],
    }
