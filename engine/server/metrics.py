"""The metrics: one table that says what there is, and the meters that this process keeps itself.

The reference page is made from ``METRICS`` and a test holds ``/metrics`` against it. What a rank knows is read from
its black box when somebody asks (``rank_metrics``), so a stuck rank's numbers are there too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from engine.blackbox import COUNTERS
from engine.server.errors import ApiError

disable_created_metrics()  # type: ignore[no-untyped-call]

Kind = Literal["counter", "gauge", "histogram"]
STATES = frozenset({"pages_total", "pages_free", "pages_cached", "pages_pending", "running", "waiting", "grammar_waiting"})
"""Those of the black box's counters that are states, not totals."""


@dataclass(frozen=True)
class Metric:
    """``name`` as it is exposed. A histogram's samples have the suffixes _bucket, _sum and _count."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


_RANK = ("rank",)
_MODEL = ("model_name", "rank")

API: tuple[Metric, ...] = (
    Metric("lastbatch:http_requests_total", "counter", ("route", "status"), "Answered HTTP requests; 499: the client left first"),
    Metric("lastbatch:refused_requests_total", "counter", ("reason",), "Errors given to clients, by the code in their body"),
    Metric("lastbatch:disconnects_total", "counter", (), "Requests aborted because the client closed the connection"),
    Metric("lastbatch:parse_failures_total", "counter", (), "Tool calls or markup in answers that could not be parsed"),
    Metric("lastbatch:in_flight_requests", "gauge", (), "Generations sent to the scheduler and not yet finished"),
    Metric("lastbatch:time_to_first_token_seconds", "histogram", (), "From sending a generation to its first token"),
    Metric("lastbatch:inter_token_latency_seconds", "histogram", (), "Between tokens of one generation"),
    Metric("lastbatch:request_duration_seconds", "histogram", ("route",), "From the headers of a request to the end of its answer"),
    Metric("lastbatch:ready", "gauge", (), "1 from the scheduler's readiness to the shutdown"),
    Metric("lastbatch:gen_throughput", "gauge", (), "Generated tokens per second over the last 10 s"),
)

DASHBOARD: tuple[Metric, ...] = (
    Metric("lastbatch:num_running_reqs", "gauge", _MODEL, "Requests in the running batch"),
    Metric("lastbatch:num_queue_reqs", "gauge", _MODEL, "Requests that wait"),
    Metric("lastbatch:num_grammar_queue_reqs", "gauge", _MODEL, "Requests whose grammar is being compiled"),
    Metric("lastbatch:num_used_tokens", "gauge", _MODEL, "KV tokens held by requests"),
    Metric("lastbatch:token_usage", "gauge", _MODEL, "Share of the KV pool that requests hold, 0 to 1"),
    Metric("lastbatch:cache_hit_rate", "gauge", _MODEL, "Share of all prompt tokens that came from the prefix cache, 0 to 1"),
    Metric("lastbatch:spec_accept_rate", "gauge", _MODEL, "Share of all drafted tokens that were accepted, 0 to 1"),
    Metric("lastbatch:prompt_tokens_total", "counter", _MODEL, "Prompt tokens processed"),
    Metric("lastbatch:generation_tokens_total", "counter", _MODEL, "Tokens generated"),
    Metric("lastbatch:cached_tokens_total", "counter", _MODEL, "Prompt tokens taken from the prefix cache"),
    Metric("lastbatch:num_requests_total", "counter", _MODEL, "Requests that the scheduler received"),
    Metric("lastbatch:num_retractions_total", "counter", _MODEL, "Requests put back into the queue because the KV pool was full"),
)
"""From rank 0 only, under the names and with the meaning that dashboards for SGLang use."""

RANKS: tuple[Metric, ...] = (
    Metric("lastbatch:rank_up", "gauge", _RANK, "1: the rank's black box can be read"),
    Metric("lastbatch:rank_info", "gauge", ("rank", "node", "pid", "config_digest"), "Always 1; who the rank is"),
    Metric("lastbatch:rank_record_age_seconds", "gauge", _RANK, "Since the rank last wrote its black box"),
    Metric("lastbatch:rank_progress_age_seconds", "gauge", _RANK, "Since a batch last gave a result"),
    Metric("lastbatch:rank_step", "gauge", _RANK, "Step number of the rank's main thread"),
    Metric("lastbatch:rank_held_requests", "gauge", _RANK, "Requests received and not yet answered"),
    Metric("lastbatch:rank_phase", "gauge", ("rank", "phase"), "1 for the phase that the main thread is in, else 0"),
    Metric("lastbatch:rank_collectives_enqueued", "gauge", _RANK, "Sequence number of the last collective that was entered"),
    Metric("lastbatch:rank_collectives_completed", "gauge", _RANK, "Sequence number of the last collective that completed"),
    Metric("lastbatch:phase_seconds_total", "counter", ("rank", "phase"), "Time that the main thread spent in each phase"),
    Metric("lastbatch:phase_calls_total", "counter", ("rank", "phase"), "How often the main thread left each phase"),
    Metric("lastbatch:phase_rolling_max_seconds", "gauge", ("rank", "phase"), "Longest single stay of the last 30 to 60 s"),
)

_COUNTERS: dict[str, str] = {
    "requests_received": "Requests that came from the API process",
    "requests_finished": "Requests that came to their end",
    "requests_aborted": "Requests given up because their client left, or had what it wanted",
    "requests_rejected": "Requests that the scheduler refused",
    "prompt_tokens": "Prompt tokens processed",
    "cached_tokens": "Prompt tokens taken from the prefix cache",
    "generated_tokens": "Tokens generated",
    "executed_tokens": "Tokens that went through the model, drafts that were rejected among them",
    "useful_tokens": "Tokens that went through the model and were kept",
    "drafted_tokens": "Tokens that the drafter proposed",
    "accepted_tokens": "Proposed tokens that were accepted",
    "retractions": "Requests put back into the queue because the KV pool was full",
    "batches_prefill": "Batches that read prompts",
    "batches_decode": "Batches that generated one token a request",
    "batches_verify": "Batches that checked drafts",
    "grammar_compiles": "Requests whose grammar was compiled, or found compiled",
    "grammar_failures": "Requests whose grammar could not be compiled",
    "pages_total": "Pages of the KV pool",
    "pages_free": "Pages of the KV pool that are free",
    "pages_cached": "Pages that the prefix cache owns",
    "pages_pending": "Pages given back that a batch on its way may still read",
    "running": "Requests in the running batch",
    "waiting": "Requests that wait for their turn",
    "grammar_waiting": "Requests that wait for their grammar to be compiled",
}
OF_EVERY_RANK = frozenset({"executed_tokens", "useful_tokens", "batches_prefill", "batches_decode", "batches_verify", "running"})
"""Those of the black box's counters that every rank keeps; the others are rank 0's, which alone decides."""

COUNTED: tuple[Metric, ...] = tuple(
    Metric(
        f"lastbatch:rank_{name}" + ("" if name in STATES else "_total"),
        "gauge" if name in STATES else "counter",
        _RANK,
        _COUNTERS[name] + ("" if name in STATES else ", since the server is ready") + ("" if name in OF_EVERY_RANK else "; of rank 0"),
    )
    for name in COUNTERS
)
"""One for each counter of the black box, in its order."""

METRICS = (*API, *DASHBOARD, *RANKS, *COUNTED)

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Meters:
    """What this process counts itself. ``registry`` also takes the ranks' collector."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        table = {metric.name: metric for metric in API}

        def described(name: str) -> tuple[str, str, tuple[str, ...]]:
            metric = table[f"lastbatch:{name}"]
            return metric.name, metric.help, metric.labels

        def counter(name: str) -> Counter:
            return Counter(*described(name), registry=self.registry)

        def gauge(name: str) -> Gauge:
            return Gauge(*described(name), registry=self.registry)

        def histogram(name: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(*described(name), registry=self.registry, buckets=buckets)

        self.requests = counter("http_requests_total")
        self._refused = counter("refused_requests_total")
        self.disconnected = counter("disconnects_total")
        self.parse_failures = counter("parse_failures_total")
        self.time_to_first_token = histogram("time_to_first_token_seconds", _FIRST_TOKEN_S)
        self.inter_token_latency = histogram("inter_token_latency_seconds", _BETWEEN_TOKENS_S)
        self.duration = histogram("request_duration_seconds", _REQUEST_S)
        self._in_flight = gauge("in_flight_requests")
        self._ready = gauge("ready")
        self._throughput = gauge("gen_throughput")

    def watch(self, *, in_flight: Callable[[], float], ready: Callable[[], float], throughput: Callable[[], float]) -> None:
        """Gauges that are asked for when somebody scrapes."""
        self._in_flight.set_function(in_flight)
        self._ready.set_function(ready)
        self._throughput.set_function(throughput)

    def refused(self, error: ApiError) -> None:
        self._refused.labels(error.code).inc()
