"""From the answers of a measurement to its figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec

from opsctl.load import asked
from opsctl.load.asked import Asked
from opsctl.load.cell import Ran
from opsctl.load.figures import percentile

_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_Figure = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
Quantiles = dict[str, _Figure]  # p50, p90, p99, max; empty when nothing was measured


class Metric(msgspec.Struct, frozen=True):
    """What a person reads, in which unit, and by how much a value in seconds is multiplied for it."""

    words: str
    unit: str
    scale: float = 1.0


METRICS: dict[str, Metric] = {
    "tokens_per_s": Metric("throughput", "tok/s"),
    "requests_per_s": Metric("requests", "/s"),
    "first_token_s.p50": Metric("first token p50", "ms", 1e3),
    "first_token_s.p99": Metric("first token p99", "ms", 1e3),
    "gap_s.p50": Metric("inter-token p50", "ms", 1e3),
    "gap_s.p90": Metric("inter-token p90", "ms", 1e3),
    "gap_s.p99": Metric("inter-token p99", "ms", 1e3),
    "per_token_s.p50": Metric("per token p50", "ms", 1e3),
    "seconds.p50": Metric("request p50", "ms", 1e3),
    "seconds.p99": Metric("request p99", "ms", 1e3),
}


class Summary(msgspec.Struct, frozen=True):
    """One repetition of one level. Latencies are of answers that came as expected; ``errors`` counts the others by kind,
    ``not_ours`` what the run's own limits ended or did not send. ``tokens`` are all that were generated."""

    asked: int
    ok: int
    errors: dict[str, int]
    not_ours: dict[str, int]
    wall_s: _Figure
    tokens: int
    prompt_tokens: int
    tokens_per_s: _Figure
    requests_per_s: _Figure
    first_token_s: Quantiles
    gap_s: Quantiles
    per_token_s: Quantiles
    seconds: Quantiles
    client_cpu: _Figure
    lag_p99_s: _Figure
    by_shape: dict[str, dict[str, int]]
    counted: bool = True  # false: the server gave no usage, tokens are parts of streams

    def value(self, metric: str) -> float | None:
        """A metric of ``METRICS`` by its name; None when it was not measured."""
        name, _, share = metric.partition(".")
        found = getattr(self, name)
        if share:
            return dict(found).get(share)
        return float(found)


def summarise(ran: Ran) -> Summary:
    good = [a for a in ran.answers if a.ok]
    wrong = Counter(a.error for a in ran.answers if a.error)
    counted = all(a.tokens is not None for a in good)
    tokens = sum(_tokens(a) for a in ran.answers)
    return Summary(
        asked=len(ran.answers),
        ok=len(good),
        errors={kind: count for kind, count in wrong.most_common() if kind not in asked.NOT_THE_SERVERS},
        not_ours={kind: count for kind, count in wrong.most_common() if kind in asked.NOT_THE_SERVERS},
        wall_s=ran.wall_s,
        tokens=tokens,
        prompt_tokens=sum(a.prompt_tokens or 0 for a in good),
        tokens_per_s=tokens / ran.wall_s,
        requests_per_s=len(good) / ran.wall_s,
        first_token_s=_quantiles([a.first_s for a in good if a.first_s is not None]),
        gap_s=_quantiles([gap for a in good for gap in a.gaps_s]),
        per_token_s=_quantiles([a.per_token_s for a in good if a.per_token_s is not None]),
        seconds=_quantiles([a.seconds for a in good]),
        client_cpu=ran.client_cpu,
        lag_p99_s=ran.lag_p99_s,
        by_shape=_by_shape(ran.answers),
        counted=counted,
    )


def _tokens(answer: Asked) -> int:
    return answer.tokens if answer.tokens is not None else len(answer.moments_s)


def _by_shape(answers: Sequence[Asked]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for answer in answers:
        found.setdefault(answer.shape, Counter())[answer.error or "ok"] += 1
    return {name: dict(counts.most_common()) for name, counts in sorted(found.items())}


def _quantiles(values: Sequence[float]) -> Quantiles:
    return {name: percentile(values, share) for name, share in _SHARES.items()} if values else {}


def client_bound(summary: Summary) -> str:
    """Why the client itself may be what was measured; empty when there is no sign of it."""
    if summary.client_cpu > 0.8:
        return f"the client used {summary.client_cpu:.0%} of a core: its times are too long and its rates too low"
    gap = summary.gap_s.get("p50", 0.0)
    if gap and summary.lag_p99_s > gap:
        return f"the client's own loop ran {summary.lag_p99_s * 1e3:.0f} ms late (p99), more than a token's {gap * 1e3:.0f} ms"
    return ""
