"""Prometheus text: fetch, and sum what a dialect names. Counters speak before gauges: a gauge keeps its last value
through a hang."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping

from monitors.engines import Dialect
from monitors.judge.holding import Page
from monitors.observe.reading import Reading, gap

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|NaN|Inf))\b")
_MOST_BYTES = 8 << 20


def parse(text: str) -> dict[str, float]:
    """Values by name, summed over labels. NaN and infinities are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match["value"].lstrip("+-") not in ("NaN", "Inf"):
            found[match["name"]] = found.get(match["name"], 0.0) + float(match["value"])
    return found


def total(values: Mapping[str, float], names: Iterable[str]) -> float | None:
    """The sum of the named values; None when the page has none of them."""
    present = [values[name] for name in names if name in values]
    return sum(present) if present else None


def fetch(url: str, *, deadline_s: float, headers: Mapping[str, str] | None = None) -> Reading[bytes]:
    """GET a page. Only an answer of 200 is a value."""
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=deadline_s) as answer:
            return Reading(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        error.close()
        return gap(f"GET {url}: status {error.code}")
    except (OSError, ValueError) as error:
        return gap(f"GET {url}: {getattr(error, 'reason', None) or error}")


def held(values: Mapping[str, float], dialect: Dialect) -> float | None:
    """Requests that run or wait, by the gauges."""
    return total(values, (*dialect.metrics.running, *dialect.metrics.waiting))


def progress(values: Mapping[str, float], dialect: Dialect) -> float | None:
    """A number that grows with every token, by the counters."""
    return total(values, dict.fromkeys((*dialect.metrics.progress, *dialect.metrics.steps)))


def by_steps(values: Mapping[str, float], dialect: Dialect) -> bool:
    """Whether a counter is exported that every step moves."""
    return any(name in values for name in dialect.metrics.steps)


def grown(before: Mapping[str, float], values: Mapping[str, float], dialect: Dialect) -> dict[str, float]:
    """By how much the dialect's counters of errors have grown since an earlier page. A server that has started again
    counts from 0."""
    now = {name: values[name] for name in dialect.metrics.errors if name in values}
    return {name: value - before[name] for name, value in now.items() if name in before and value > before[name]}


def page(values: Mapping[str, float], dialect: Dialect) -> Page:
    """What the judge of held work reads."""
    names = dialect.metrics
    return Page(held(values, dialect), progress(values, dialect), total(values, names.accepted), total(values, names.answered))
