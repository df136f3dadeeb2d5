"""How fast a server answers the same load before a change and after it, and whether the difference is one.

The load runs at concurrency 1 and 4, several times each. What is compared is the median of tokens in a second; how
sure it is comes from a bootstrap over the repetitions. A machine whose repetitions scatter, or that serves others
meanwhile, gives no answer rather than a wrong one.
"""

from __future__ import annotations

import concurrent.futures
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from opsctl.callers.matrix import Ask
from opsctl.rollout.checks import Check, failed, inconclusive, passed
from opsctl.rollout.probe import ApiError

CONCURRENCY = (1, 4)
LEAST = 5  # repetitions of each
TOKENS = 32
_SCATTER = 0.25  # half the spread between the quartiles, as a share of the median
_FOREIGN = 0.2  # of the server's tokens in that time, for somebody else
_DRAWS = 2000
_SURE = 0.95


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens_per_s`` of each repetition, by concurrency (as text). ``foreign``: the share of the server's tokens that
    were for others; None where it has no counters. ``load``: the nodes' load averages while it was measured."""

    tokens_per_s: dict[str, list[float]]
    foreign: float | None = None
    load: dict[str, float] = {}


def measure(
    ask: Ask, nonce: Callable[[], str], *, repetitions: int = LEAST, counter: Callable[[], float | None] = lambda: None,
    load: Callable[[], dict[str, float]] = dict, clock: Callable[[], float] = time.monotonic,
) -> Speed:  # fmt: skip
    """``ask`` may be called from several threads. Raises ApiError when the load is not answered."""
    found: dict[str, list[float]] = {}
    own, before = 0, counter()
    for at_once in CONCURRENCY:
        with concurrent.futures.ThreadPoolExecutor(at_once, thread_name_prefix="load") as pool:
            for number in range(repetitions + 1):
                requests = [_request(nonce()) for _ in range(at_once)]
                start = clock()
                replies = list(pool.map(ask, requests))
                seconds = clock() - start
                bad = next((r for r in replies if r.why or r.status != 200), None)
                if bad is not None:
                    raise ApiError(f"the load at concurrency {at_once} was not answered: HTTP {bad.status} {bad.why}")
                tokens = sum(reply.tokens for reply in replies)
                own += tokens + sum(reply.prompt_tokens for reply in replies)
                if not tokens:
                    raise ApiError("the load was answered without a count of tokens (usage)")
                if number:  # the first one warms up
                    found.setdefault(str(at_once), []).append(tokens / max(seconds, 1e-9))
    after = counter()
    foreign = None if before is None or after is None or after <= before else max(0.0, 1 - own / (after - before))
    return Speed(tokens_per_s={key: [round(v, 2) for v in values] for key, values in found.items()}, foreign=foreign, load=load())


def _request(nonce: str) -> dict[str, Any]:
    content = f"[{nonce}] one two three four five six seven eight. Go on counting in words for as long as you can."
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


def more(first: Speed, second: Speed) -> Speed:
    """Both as one."""
    joined = {key: first.tokens_per_s.get(key, []) + values for key, values in second.tokens_per_s.items()}
    foreign = max((one.foreign for one in (first, second) if one.foreign is not None), default=None)
    return Speed(tokens_per_s=joined, foreign=foreign, load=second.load)


def compare(before: Speed | None, after: Speed, allowance_pct: float, seed: int = 7) -> Check:
    """Passed when the loss is within the allowance for sure, failed when it is above it for sure."""
    if before is None:
        return inconclusive("throughput", "not measured before the change")
    data: dict[str, Any] = {"before": msgspec.to_builtins(before), "after": msgspec.to_builtins(after), "allowance_pct": allowance_pct}
    told, unsure, lost = [], [], []
    for key, now in after.tokens_per_s.items():
        was = before.tokens_per_s.get(key, [])
        if len(was) < LEAST or len(now) < LEAST:
            unsure.append(f"at concurrency {key} there are {len(was)} and {len(now)} samples, {LEAST} are needed")
            continue
        low, middle, high = loss(was, now, seed)
        data[f"loss_pct_{key}"] = [round(100 * value, 1) for value in (low, middle, high)]
        told.append(f"concurrency {key}: {statistics.median(was):.1f} -> {statistics.median(now):.1f} tokens/s, loss {100 * middle:.0f} % "
                    f"({100 * low:.0f} to {100 * high:.0f})")  # fmt: skip
        if 100 * low > allowance_pct:
            lost.append(key)
        elif 100 * high > allowance_pct:
            unsure.append(f"at concurrency {key} the loss lies on both sides of {allowance_pct:g} %")
        unsure += [f"the repetitions {when} scatter by {s:.0%} at concurrency {key}" for when, s in
                   (("before", scatter(was)), ("after", scatter(now))) if s > _SCATTER]  # fmt: skip
    unsure += [f"{share:.0%} of the tokens {when} were for others" for when, share in
               (("before", before.foreign), ("after", after.foreign)) if share is not None and share > _FOREIGN]  # fmt: skip
    text = "; ".join(told) + f"; load {_load(before.load)} before, {_load(after.load)} after"
    steady = not any("scatter" in one or "for others" in one for one in unsure)
    if lost and steady:
        return failed("throughput", f"loses more than the {allowance_pct:g} % allowed; {text}", **data)
    if unsure or not told:
        return inconclusive("throughput", f"{'; '.join(unsure) or 'no samples'}; {text}", **data)
    return passed("throughput", f"within the {allowance_pct:g} % allowed; {text}", **data)


def loss(before: Sequence[float], after: Sequence[float], seed: int = 7) -> tuple[float, float, float]:
    """The relative loss of the median as (low, found, high): a percentile bootstrap at 95 %. Negative: a gain."""
    chance = random.Random(seed)
    drawn = sorted(
        1 - statistics.median(chance.choices(after, k=len(after))) / statistics.median(chance.choices(before, k=len(before)))
        for _ in range(_DRAWS)
    )
    tail = (1 - _SURE) / 2
    return drawn[int(tail * _DRAWS)], 1 - statistics.median(after) / statistics.median(before), drawn[int((1 - tail) * _DRAWS) - 1]


def scatter(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle if middle else 1.0


def _load(found: Mapping[str, float]) -> str:
    return ", ".join(f"{node} {value:.1f}" for node, value in found.items()) or "not known"
