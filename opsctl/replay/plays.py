"""The kinds of steps. Each plays its part on the stage and returns what it measured; what cannot be played is a StageError."""

from __future__ import annotations

import datetime
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine import blackbox
from monitors.capture import bundle
from monitors.exit_codes import ExitCode
from opsctl.replay import scaling
from opsctl.replay.document import Rollout, Step
from opsctl.replay.facts import Captured, Changed, Reproduced, Wedged
from opsctl.replay.stage import Left, Stage
from opsctl.replay.starts import starts, tracebacks
from opsctl.rollout import throughput
from opsctl.rollout.probe import Api, ApiError
from opsctl.staging.waiting import StageError, wait_for

_STILL_NS = 1_500_000_000  # no progress for so long, waiting for the device: a wedge, and the monitor will say so
_REVIEW_DAYS = 30
_ANSWER_S = 60.0
_REPETITIONS = 3  # of the load that measures speed
_HOUR_S = 3600.0
_MARGIN_S = 2.0

Play = Callable[[Stage, Step, Left], msgspec.Struct]


def wedge(stage: Stage, step: Step, left: Left) -> Wedged:
    """The loop and the monitor stay up: the capture is the monitor's own affair."""
    assert step.wedge is not None
    wanted = step.wedge.turns
    stage.watch().wait("state", min(60.0, left()))
    loop = stage.begin_loop()
    wait_for(lambda: loop.completed >= wanted, left(), f"{wanted} turns of the loop")
    wait_for(lambda: _host(stage).running > 0, left(), "a turn that runs")
    turns = loop.completed
    stage.talk(f"{turns} turns of the loop are done; one constrained request goes out beside it")
    sent = stage.send_constrained()

    def still() -> bool:
        host = _host(stage)
        waits = host.phase is blackbox.Phase.wait_device and host.held > 1
        return waits and host.progress_ns / 1e9 > sent and time.monotonic_ns() - host.progress_ns > _STILL_NS

    wait_for(still, left(), "the hang")
    host = _host(stage)
    stage.wedged, stage.serving = host.progress_ns / 1e9, False
    with httpx.Client(trust_env=False, timeout=5) as client:
        status = client.get(f"{stage.pair.url}/health").status_code
    stage.talk(f"no progress since {stage.wedged - sent:.2f} s after it; step {host.step}, phase {host.phase.name}; /health says {status}")
    return Wedged(round(stage.wedged - sent, 3), status, host.phase.name, turns)


def _host(stage: Stage) -> blackbox.Host:
    return blackbox.read(stage.pair.box_of(0), events=False).host


def capture(stage: Stage, _step: Step, left: Left) -> Captured:
    if stage.wedged is None:
        raise StageError("nothing is wedged: there is nothing to capture")
    since, watcher = stage.wedged, stage.watch()
    declared = watcher.wait("stall_declared", left())
    stage.talk(f"hang-monitor: stall declared, {declared['quiet_s']} s without progress")
    captured = watcher.wait("captured", left())
    verdict = watcher.wait("verdict", left())
    page = watcher.wait("page", left())
    folder = Path(captured["bundle"])
    manifest = bundle.load(folder)
    boxes = {item["rank"] for item in manifest["items"] if item["probe"] == "black_box" and item["outcome"] == "taken"}
    spent = captured["mono_s"] - since
    stage.talk(f"hang-monitor: {verdict['verdict']} ({verdict['confidence']:.2f}), bundle of {captured['items']} items: {folder}")
    return Captured(
        declared_s=round(declared["mono_s"] - since, 2), captured_s=round(spent, 2),
        before_watchdog_s=round(stage.day.watchdog_s - spent, 1),
        items=captured["items"], ranks=len(boxes), verdict=verdict["verdict"], confidence=round(verdict["confidence"], 2),
        valid=bundle.verify(folder).ok, paged=bool(page.get("page_sent")), bundle=str(folder),
    )  # fmt: skip


def repro(stage: Stage, step: Step, left: Left) -> Reproduced:
    assert step.repro is not None
    name = f"{stage.day.name}-{step.name}"
    document, scaled = scaling.scaled(scaling.shipped(step.repro.of), step.repro.change, name)
    (stage.pair.folder / "playbooks" / f"{name}.yaml").write_text(document)
    stage.talk(f"opsctl repro run {step.repro.of} ({scaled or 'as shipped'})")
    answer = stage.pair.opsctl("repro", "run", name, deadline_s=left())
    if not answer["data"]:
        raise StageError(f"the experiment did not run: {answer['errors']}")
    run = answer["data"]["runs"][-1]
    if run["outcome"] == "reproduced":
        stage.serving = False
    stage.talk(answer["data"]["sentence"])
    latency: Mapping[str, Any] = run["refusals"] or run["answers"] or {}
    return Reproduced(
        exit_code=answer["exit_code"], outcome=run["outcome"], why=run["why"], seconds=round(run["seconds"], 1), turns=run["turns"],
        probes=run["probes"], expected=run["expected"], verdict=run["verdict"], overlap=run["overlap"]["share"], after_s=run["after_s"],
        p50_s=latency.get("p50_s"), p99_s=latency.get("p99_s"), most_s=latency.get("max_s"), over_1s=latency.get("over_1s", 0),
        turn_errors=sum(run["turn_errors"].values()), scaled=scaled,
    )  # fmt: skip


def rollout(stage: Stage, step: Step, left: Left) -> Changed:
    assert step.rollout is not None
    asked = step.rollout
    stage.gateway.falls_back_on = asked.fallback
    elsewhere = stage.gateway.answered_elsewhere
    before = _speed(stage, left) if asked.speed else (None, None)
    old = sum(tracebacks(stage.pair.journal(node, last_s=_HOUR_S)) for node in stage.pair.nodes)
    words = _words(asked, step.says)
    stage.talk(f"opsctl {' '.join(words)}")
    since, begun = time.time(), time.monotonic()
    answer = stage.pair.opsctl(*words, deadline_s=left())
    took = time.monotonic() - begun
    failed = max(starts(stage.pair.journal(node, last_s=took + _MARGIN_S), since).failed for node in stage.pair.nodes)
    stage.serving = answer["exit_code"] in (ExitCode.DONE, ExitCode.REVERTED, ExitCode.USAGE)
    data = answer["data"] or {}
    stage.talk(f"exit code {answer['exit_code']}: {data.get('state') or answer['errors'][0]['message']}"
               + (f" ({data['why']})" if data.get("why") else ""))  # fmt: skip
    after = _speed(stage, left) if asked.speed and answer["exit_code"] == ExitCode.DONE else (None, None)
    return Changed(
        exit_code=answer["exit_code"], state=data.get("state", "refused"), seconds=round(took, 1), failed_starts=failed,
        why=data.get("why") or "; ".join(one["message"] for one in answer["errors"]), old_tracebacks=old,
        elsewhere=stage.gateway.answered_elsewhere - elsewhere, one_before=before[0], four_before=before[1], one_after=after[0],
        four_after=after[1], **_of_result(data),
    )  # fmt: skip


def _words(asked: Rollout, reason: str) -> list[str]:
    change = asked.change
    words = ["rollout", "apply", "--yes", "--reason", reason, *(["--incident"] if change.incident else [])]
    for flag, value in change.set.items():
        words += ["--set", flag if value is True else f"{flag}={value}"]
    words += [word for flag in change.unset for word in ("--unset", flag)]
    words += [word for name, value in change.env.items() for word in ("--env", f"{name}={value}")]
    words += [word for caller, to in asked.agreed.items() for word in ("--expect-change", f"{caller}={to}")]
    if asked.agreed:
        words += ["--review-by", (datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=_REVIEW_DAYS)).isoformat()]
    return words


def _of_result(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a rollout's own result says; nothing of one that was refused before it began."""
    if not data:
        return {}
    checks, moments = data["checks"], data["moments"]
    which = "revert: " if data["state"] == "reverted" else ""
    known, started = moments.get("failure known"), moments.get("group started")
    ordered, answered = moments.get(f"{which}group stopping"), moments.get(f"{which}first good answer")
    steady = next((one for one in checks if one["name"] == "steady" and one["outcome"] == "passed"), None)
    return {
        "failed": next((one["name"] for one in checks if one["outcome"] != "passed"), ""),
        "unnoticed_s": None if known is None or started is None else round(known - started, 1),
        "without_service_s": data["without_service_s"],
        "first_answer_s": None if ordered is None or answered is None else round(answered - ordered, 1),
        "stable_s": steady["data"].get("seconds") if steady else None,
        "paged": data["page_sent"],
    }


def _speed(stage: Stage, left: Left) -> tuple[float, float]:
    """Tokens in a second with one stream and with four: medians of what a rollout would measure. Raises StageError."""
    api = Api(stage.pair.url)
    try:
        found = throughput.measure(
            lambda request: api.ask(request, min(_ANSWER_S, left())), lambda: secrets.token_hex(6), repetitions=_REPETITIONS
        )
    except ApiError as error:
        raise StageError(f"speed could not be measured: {error}") from error
    finally:
        api.close()
    one, four = (round(statistics.median(found.tokens_per_s[str(at_once)]), 1) for at_once in throughput.CONCURRENCY)
    stage.talk(f"speed: {one:.1f} tokens/s with one stream, {four:.1f} with four")
    return one, four


PLAYS: Mapping[str, Play] = {"wedge": wedge, "capture": capture, "repro": repro, "rollout": rollout}
