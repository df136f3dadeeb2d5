"""Who asks how often, from the engine's access log; and when a client has all but fallen silent. Pure.

A client that falls back to a hosted model looks well to its users: what gives it away is that its requests no longer
come here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from monitors.fleet import Caller
from monitors.observe import stamps
from opsctl.rollout.probe import OWN_RID

_LINE = re.compile(r"\breq rid=(?P<rid>\S+) caller=(?P<caller>\S+) shape=\S+ prompt_sha=(?P<sha>\S+) status=(?P<status>\d+)")
LEAST = 10.0  # requests that a window must have promised before their absence says anything
COLLAPSE = 0.2  # of what was promised
_CHANCE = 1e-4  # that requests at the old rate are so few by luck


class Rates(msgspec.Struct, frozen=True):
    """Requests in a second by caller (the log's hash), over the last ``window_s`` before something was changed."""

    window_s: float = 0.0
    per_s: dict[str, float] = {}
    at_utc: dict[str, str] = {}  # when a rate was seen, by caller

    def stamped(self, at_utc: str) -> Rates:
        return Rates(self.window_s, self.per_s, dict.fromkeys(self.per_s, at_utc))

    def after(self, old: Rates, oldest_utc: str) -> Rates:
        """These, but for callers that have all but stopped since ``old``, or of whom too short a look was taken: their rate
        stays what it was (unless it was seen before ``oldest_utc``), or a record made while clients are served elsewhere
        would hide just that."""
        kept = {
            caller: rate for caller, rate in old.per_s.items()
            if old.at_utc.get(caller, "") >= oldest_utc
            and (rate * self.window_s < LEAST or self.per_s.get(caller, 0.0) <= COLLAPSE * rate)
        }  # fmt: skip
        return Rates(self.window_s, {**self.per_s, **kept}, {**self.at_utc, **{caller: old.at_utc[caller] for caller in kept}})


@dataclass(frozen=True)
class Collapse:
    """A caller that asked at ``before_per_s``, of which ``promised`` requests would have followed, and ``seen`` did."""

    caller: str
    before_per_s: float
    promised: float
    seen: int

    @property
    def text(self) -> str:
        return (
            f"{self.caller}: {self.seen} requests where its rate of before ({self.before_per_s * 60:.1f} a minute) promised "
            f"{self.promised:.0f}; is it being served elsewhere?"
        )


def requests(texts: Iterable[str]) -> Counter[tuple[str, str]]:
    """How often each (request id, caller) stands in these lines, opsctl's own left out. Clients may choose the same id twice."""
    found: Counter[tuple[str, str]] = Counter()
    for text in texts:
        match = _LINE.search(text)
        if match and not match["rid"].startswith(OWN_RID):
            found[match["rid"], match["caller"]] += 1
    return found


def counts(texts: Iterable[str]) -> Counter[str]:
    """Requests by caller, opsctl's own left out."""
    return by_caller(requests(texts))


def by_caller(found: Mapping[tuple[str, str], int]) -> Counter[str]:
    total: Counter[str] = Counter()
    for (_, caller), n in found.items():
        total[caller] += n
    return total


def shas(texts: Iterable[str]) -> frozenset[str]:
    """``prompt_sha`` of every request that the server answered. One that it refused was not answered by it, whatever the
    client got: that is how a gateway's fallback begins."""
    return frozenset(match["sha"] for text in texts if (match := _LINE.search(text)) and match["status"] == "200")


def rates(texts: Iterable[str], window_s: float) -> Rates:
    """Over the lines of the last ``window_s`` seconds, by the log's own clock, whose zone nobody knows: its now is
    opsctl's own last request (one has just been sent), else the last line. Lines without a time tell nothing of a rate."""
    first = now = last = None
    stamped: list[tuple[float, str]] = []
    for text in texts:
        match = _LINE.search(text)
        moment = stamps.find(text) if match or first is None else None
        if moment is None:
            continue
        first = moment.unix_s if first is None else first
        last = moment.unix_s
        if match:
            stamped.append((moment.unix_s, text))
            now = moment.unix_s if match["rid"].startswith(OWN_RID) else now
    end = now if now is not None else last
    if first is None or end is None or (window := min(window_s, end - first)) < 1:
        return Rates()
    return Rates(window, {who: n / window for who, n in counts(text for at, text in stamped if at > end - window).items()})


def collapses(before: Rates, seen: Mapping[str, int], seconds: float, names: Mapping[str, str]) -> list[Collapse]:
    """Who has all but stopped in a window of ``seconds``. ``names`` are the callers' names by their hash."""
    found = []
    for caller, rate in sorted(before.per_s.items()):
        promised, came = rate * seconds, seen.get(caller, 0)
        if promised >= LEAST and came <= COLLAPSE * promised and _at_most(came, promised) < _CHANCE:
            found.append(Collapse(names.get(caller, f"caller {caller}"), rate, promised, came))
    return found


def _at_most(n: int, mean: float) -> float:
    """The chance of at most ``n`` events where ``mean`` are expected (Poisson)."""
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(n + 1))


def hash_of(caller: Caller, key: str) -> str:
    """How the access log names a client: a hash of its key, or of its user agent where it sends none. Empty: not known."""
    text = key or caller.user_agent
    return hashlib.sha256(text.encode()).hexdigest()[:8] if text else ""
