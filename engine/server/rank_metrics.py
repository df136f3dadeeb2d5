"""The ranks' side of ``/metrics``: read from their black boxes at every scrape, by the table in ``metrics``.

A gauge here never keeps the value of a better time: a rank that writes nothing shows the age of its record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from engine.blackbox import COUNTERS, Phase, Snapshot
from engine.server.boxes import RankReading
from engine.server.metrics import COUNTED, DASHBOARD, OF_EVERY_RANK, RANKS, Metric

Sample = tuple[tuple[str, ...], float]


class RankCollector:
    """A collector for a Prometheus registry. ``read`` gives the ranks' boxes, ``page_size`` tokens a KV page."""

    def __init__(self, read: Callable[[], list[RankReading]], *, model_name: str, page_size: int,
                 clock_ns: Callable[[], int] = time.monotonic_ns) -> None:  # fmt: skip
        self._read = read
        self._model_name = model_name
        self._page_size = page_size
        self._clock_ns = clock_ns

    def describe(self) -> Iterable[Family]:
        """The names, so that the registry need not read boxes to know them."""
        return [_family(metric, []) for metric in (*DASHBOARD, *RANKS, *COUNTED)]

    def collect(self) -> Iterator[Family]:
        readings = self._read()
        now_ns = self._clock_ns()
        known = {str(reading.rank): reading.snapshot for reading in readings if reading.snapshot is not None}
        yield _family(RANKS[0], [((str(reading.rank),), float(reading.snapshot is not None)) for reading in readings])
        for metric in RANKS[1:]:
            yield _family(metric, [sample for rank, box in known.items() for sample in _of_rank(metric.name, rank, box, now_ns)])
        for metric, name in zip(COUNTED, COUNTERS, strict=True):
            own = {rank: box for rank, box in known.items() if rank == "0" or name in OF_EVERY_RANK}
            yield _family(metric, [((rank,), float(box.host.counters[name])) for rank, box in own.items()])
        first = known.get("0")
        values = _dashboard(first, self._page_size) if first is not None else {}
        for metric in DASHBOARD:
            yield _family(metric, [((self._model_name, "0"), values[metric.name])] if values else [])


def _of_rank(name: str, rank: str, box: Snapshot, now_ns: int) -> list[Sample]:
    header, host, device = box.header, box.host, box.device
    match name.removeprefix("lastbatch:"):
        case "rank_info":
            return [((rank, str(header.node), str(header.pid), header.config_digest), 1.0)]
        case "rank_record_age_seconds":
            return [((rank,), max(box.age_s(now_ns), 0.0))]
        case "rank_progress_age_seconds":
            return [((rank,), max((now_ns - host.progress_ns) / 1e9, 0.0))]
        case "rank_step":
            return [((rank,), float(host.step))]
        case "rank_held_requests":
            return [((rank,), float(host.held))]
        case "rank_phase":
            return [((rank, phase.name), float(phase is host.phase)) for phase in Phase]
        case "rank_collectives_enqueued":
            return [((rank,), float(device.enqueued))]
        case "rank_collectives_completed":
            return [((rank,), float(device.completed))]
        case "phase_seconds_total":
            return [((rank, phase.name), stat.total_ns / 1e9) for phase, stat in host.phases.items()]
        case "phase_calls_total":
            return [((rank, phase.name), float(stat.calls)) for phase, stat in host.phases.items()]
        case "phase_rolling_max_seconds":
            return [((rank, phase.name), stat.rolling_max_ns / 1e9) for phase, stat in host.phases.items()]
    raise AssertionError(f"{name} is in the table and nothing reads it")


def _dashboard(box: Snapshot, page_size: int) -> dict[str, float]:
    count = box.host.counters
    used = max(count["pages_total"] - count["pages_free"] - count["pages_cached"], 0)

    def share(part: int, whole: int) -> float:
        return part / whole if whole else 0.0

    values = {
        "num_running_reqs": float(box.host.running),
        "num_queue_reqs": float(box.host.waiting),
        "num_grammar_queue_reqs": float(count["grammar_waiting"]),
        "num_used_tokens": float(used * page_size),
        "token_usage": share(used, count["pages_total"]),
        "cache_hit_rate": share(count["cached_tokens"], count["prompt_tokens"]),
        "spec_accept_rate": share(count["accepted_tokens"], count["drafted_tokens"]),
        "prompt_tokens_total": float(count["prompt_tokens"]),
        "generation_tokens_total": float(count["generated_tokens"]),
        "cached_tokens_total": float(count["cached_tokens"]),
        "num_requests_total": float(count["requests_received"]),
        "num_retractions_total": float(count["retractions"]),
    }
    return {f"lastbatch:{name}": value for name, value in values.items()}


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
