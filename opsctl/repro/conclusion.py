"""From what happened to what may be said. Pure: counts, intervals, and the sentence that they support."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from monitors.exit_codes import ExitCode
from opsctl.load.figures import percentile, short, wilson
from opsctl.repro.experiment import Experiment
from opsctl.repro.overlap import Measured


class Outcome(enum.StrEnum):
    reproduced = "reproduced"
    not_reproduced = "not reproduced"
    inconclusive = "inconclusive"
    failed = "failed"  # the fault did not come, and something else that was expected did not either


class Latency(msgspec.Struct, frozen=True):
    count: int
    p50_s: float
    p99_s: float
    max_s: float
    over_1s: int = 0

    @staticmethod
    def of(values: Sequence[float]) -> Latency | None:
        if not values:
            return None
        return Latency(len(values), percentile(values, 0.5), percentile(values, 0.99), max(values), sum(value > 1 for value in values))

    def __str__(self) -> str:
        return f"p50 {short(self.p50_s)} s, p99 {short(self.p99_s)} s, max {short(self.max_s)} s"


class Run(msgspec.Struct, frozen=True):
    """One run. ``fault`` says what was seen of it, empty for nothing; ``after_s`` counts from the begin of the request
    under suspicion that was open then. ``errors``: answers that were not as expected, by kind."""

    seconds: float
    turns: int
    turn_errors: dict[str, int]
    probes: int
    expected: int  # of them, answered (or refused) as expected
    probe_errors: dict[str, int]
    overlap: Measured
    fault: str = ""
    after_s: float | None = None
    verdict: str = ""
    bundle: str = ""
    refusals: Latency | None = None
    refusals_beside_prefill: Latency | None = None
    answers: Latency | None = None
    prefills: int = 0
    open: int = 0  # requests of any kind that had no answer when the run ended
    most_context: int = 0
    tokens_per_s: float = 0.0
    notes: tuple[str, ...] = ()


def outcome(experiment: Experiment, run: Run) -> tuple[Outcome, str]:
    """What a run says, and why."""
    if run.fault:
        return Outcome.reproduced, run.fault
    if run.probes < experiment.counts:
        return Outcome.inconclusive, f"{run.probes} requests under suspicion were sent, {experiment.counts} are needed"
    wrong = run.probes - run.expected
    if wrong:
        kinds = ", ".join(f"{count} {kind}" for kind, count in run.probe_errors.items())
        return Outcome.failed, f"{wrong} of {run.probes} requests were not answered as expected ({experiment.probes.expect}): {kinds}"
    if experiment.agents.streams and not run.turns:
        return Outcome.inconclusive, "not one turn of the loop was completed"
    needed = experiment.overlap
    if needed.share > 0:
        held = run.overlap.share
        if held is None:
            return Outcome.inconclusive, "no request under suspicion decoded"
        if held < needed.share:
            said = f"{held:.0%} of the time" if run.overlap.unit == "seconds" else f"{held:.0%} of {run.overlap.of:.0f} batches"
            return (
                Outcome.inconclusive,
                f"concurrency lapsed: {needed.agents} others decoded beside it {said}, {needed.share:.0%} was declared",
            )
    return Outcome.not_reproduced, "no stall and no end of the server"


def conclude(experiment: Experiment, runs: Sequence[Run]) -> tuple[Outcome, str]:
    """The sentence about all runs. One reproduction is enough to have reproduced; nothing that was not held counts as
    evidence of absence."""
    told = [outcome(experiment, run)[0] for run in runs]
    hits, clean = told.count(Outcome.reproduced), told.count(Outcome.not_reproduced)
    weighed = hits + clean
    if hits:
        low, high = wilson(hits, weighed)
        after = sorted(run.after_s for run in runs if run.fault and run.after_s is not None)
        span = short(after[0]) + (f" to {short(after[-1])}" if len(after) > 1 else "") if after else ""
        when = f", {span} s after the request under suspicion began" if span else ""
        said = f"The fault reproduced in {hits} of {weighed} runs that count{when}; its rate is {low:.0%} to {high:.0%} a run (95 %)."
        return Outcome.reproduced, said + _uncounted(told)
    if Outcome.failed in told:
        which = told.index(Outcome.failed)
        return Outcome.failed, f"No wedge, and no evidence against one: in run {which + 1} {outcome(experiment, runs[which])[1]}."
    if not clean:
        why = outcome(experiment, runs[0])[1] if runs else "nothing was run"
        return Outcome.inconclusive, f"These runs say nothing of the fault: {why}."
    low, high = wilson(0, clean)
    trials = sum(run.expected for run, one in zip(runs, told, strict=True) if one is Outcome.not_reproduced)
    each = wilson(0, trials)[1] if trials else 1.0
    what = "refused" if experiment.probes.refused else "answered"
    said = (f"Not reproduced in {clean} of {clean} runs that count. These counts exclude no rate up to {high:.0%} a run, "
            f"or, by {trials} of {trials} requests {what}, up to {each:.1%} a request (95 %).")  # fmt: skip
    if Outcome.inconclusive in told:
        return Outcome.inconclusive, said + _uncounted(told)
    return Outcome.not_reproduced, said


def _uncounted(told: Sequence[Outcome]) -> str:
    left = told.count(Outcome.inconclusive) + told.count(Outcome.failed)
    return f" {left} further runs do not count." if left else ""


EXIT = {
    Outcome.reproduced: ExitCode.FOUND,
    Outcome.failed: ExitCode.FOUND,
    Outcome.inconclusive: ExitCode.HELD,
    Outcome.not_reproduced: ExitCode.DONE,
}


def document(name: str, experiment: Experiment, runs: Sequence[Run]) -> dict[str, Any]:
    """All of it, for the JSON envelope."""
    whole, sentence = conclude(experiment, runs)
    told = [outcome(experiment, run) for run in runs]
    return {
        "experiment": name, "outcome": whole.value, "sentence": sentence,
        "runs": [{**msgspec.to_builtins(run), "outcome": one.value, "why": why} for run, (one, why) in zip(runs, told, strict=True)],
        "counts": {kind.value: [one for one, _ in told].count(kind) for kind in Outcome},
        "declared": experiment.model_dump(mode="json", exclude_defaults=True),
    }  # fmt: skip
