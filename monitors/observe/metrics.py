"""Prometheus text: fetch, and sum what a dialect names. Counters speak before gauges: a gauge keeps its last value
through a hang.

A name in a dialect may choose among a metric's samples by one label, as ``name{label=~"pattern"}``: the whole value must
match. What this cannot see: a request that an engine counts nowhere before its scheduler has it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

from monitors.engines import Dialect
from monitors.judge.holding import Page
from monitors.observe import web
from monitors.observe.reading import Reading, gap

_SAMPLE = re.compile(
    r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|NaN|Inf))\b"
)
_CHOICE = re.compile(r'^(?P<name>[\w:]+)\{(?P<label>\w+)=~"(?P<pattern>[^"]+)"\}$')
_MOST_BYTES = 8 << 20
LOAD = "server_load"  # the key under which requests in the API process's hands are kept


def parse(text: str, names: Iterable[str] = ()) -> dict[str, float]:
    """Values by name, summed over labels. NaN and infinities are left out. ``names`` that choose by a label are keys of
    their own, with the sum of what they choose."""
    found: dict[str, float] = {}
    choices: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, metric, label in _choices(tuple(names)):
        choices.setdefault(metric, []).append((name, label))
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match["value"].lstrip("+-") not in ("NaN", "Inf"):
            value = float(match["value"])
            chosen = [name for name, label in choices.get(match["name"], ()) if label.search(match["labels"] or "")]
            for name in (match["name"], *chosen):
                found[name] = found.get(name, 0.0) + value
    return found


@functools.cache
def _choices(names: tuple[str, ...]) -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    """(name, metric, what a sample's labels must hold) of those names that choose."""
    found = [(name, choice) for name in names if (choice := _CHOICE.match(name))]
    return tuple((name, c["name"], re.compile(rf'(?:^|,)\s*{c["label"]}="(?:{c["pattern"]})"')) for name, c in found)


def names_of(dialect: Dialect) -> tuple[str, ...]:
    """All that a dialect reads of a page."""
    m = dialect.metrics
    return (*m.running, *m.waiting, *m.progress, *m.steps, *m.accepted, *m.answered, *m.errors, *m.leaks)


def total(values: Mapping[str, float], names: Iterable[str]) -> float | None:
    """The sum of the named values; None when the page has none of them."""
    present = [values[name] for name in names if name in values]
    return sum(present) if present else None


def fetch(url: str, *, deadline_s: float, headers: Mapping[str, str] | None = None) -> Reading[bytes]:
    """GET a page. Only an answer of 200 is a value."""
    try:
        status, page = web.ask(url, deadline_s=deadline_s, headers=headers, most=_MOST_BYTES)
    except (OSError, ValueError) as error:
        return gap(f"GET {url}: {error}")
    return Reading(page) if status == 200 else gap(f"GET {url}: status {status}")


def scrape(api: str, dialect: Dialect, *, deadline_s: float, headers: Mapping[str, str] | None = None) -> Reading[dict[str, float]]:
    """The page of metrics and, where the dialect names one, what the API process itself has in hand (``LOAD``)."""
    page_ = fetch(f"{api}/metrics", deadline_s=deadline_s, headers=headers)
    if page_.value is None:
        return gap(page_.reason)
    values = parse(page_.value.decode(errors="replace"), names_of(dialect))
    if dialect.metrics.load:
        # Off in most servers, and then it says 0 or is not there: neither is worth a word.
        said = fetch(f"{api}{dialect.metrics.load}", deadline_s=deadline_s, headers=headers).value or b""
        count = re.search(rb'"server_load"\s*:\s*(\d{1,9})', said)
        values[LOAD] = float(count[1]) if count else 0.0
    return Reading(values)


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
    return Page(held(values, dialect), progress(values, dialect), total(values, names.accepted), total(values, names.answered),
                values.get(LOAD, 0.0))  # fmt: skip
