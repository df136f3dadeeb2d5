"""The incident on one machine: wedge, detection, capture, a hasty change that reverts by itself, and the fix.

Every line that is printed is read from the running system: black boxes, the monitor's events, opsctl's own answers,
HTTP responses. Nothing knows beforehand how it ends; a step that does not happen in time ends the demo with its reason.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine import blackbox
from monitors.exit_codes import ExitCode
from opsctl.staging.clients import CONSTRAINED, AgentLoop, Answer, ask
from opsctl.staging.site import DEPLOYMENT, Layout, Site, python_path_env, site
from opsctl.staging.waiting import StageError, wait_for

_BOOT_S = 150.0
_ROLLOUT_S = 400.0
_STALL_S = 5.0
_WATCHDOG_S = 60
_ARGS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4", "--enable-overlap-schedule",
         "--context-length", "4096", "--max-total-tokens", "16384", "--drain-timeout", "3",
         "--enable-faults", "--fault", "grammar.verify_desync", "--fault", "decode.crash:when=sequential")  # fmt: skip


@dataclass
class Story:
    """What happened, and when: ``moments`` are seconds since the wedge (the last progress of rank 0)."""

    say: Callable[[str], None]
    begun: float = field(default_factory=time.monotonic)
    moments: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    wedged: float = 0.0

    def tell(self, text: str) -> None:
        self.say(f"[{time.monotonic() - self.begun:6.1f} s] {text}")

    def moment(self, name: str, at: float | None = None) -> None:
        self.moments[name] = round((time.monotonic() if at is None else at) - self.wedged, 2)


def play(env: Mapping[str, str], say: Callable[[str], None], model: str = "") -> Story:
    """Play the incident. Raises StageError naming the step that failed."""
    story = Story(say)
    pages: list[str] = []

    def on_page(title: str) -> None:
        pages.append(title)
        story.tell(f"PAGE: {title}")

    layout = Layout("demo", _ARGS, nodes=((0, 1), (2,)), model=model, watchdog_s=_WATCHDOG_S, stall_s=_STALL_S)
    with site(layout, python_path_env(env), on_page) as stage:
        story.facts["folder"] = str(stage.folder)
        _boot(story, stage)
        watcher = stage.monitor()
        loop = AgentLoop(stage.url)
        try:
            loop.start()
            wait_for(lambda: loop.completed >= 2, 120, "two turns of the agent loop")
            story.tell(f"agent loop: {loop.completed} turns done, unconstrained")
            hanging = _wedge(story, stage, loop)
            _captured(story, stage, watcher)
            _hasty_change(story, stage, loop)
            hanging.join(30)
            _fix(story, stage, loop)
        finally:
            loop.stop()
            watcher.close()
        story.facts.update(turns_completed=loop.completed, turns_failed=loop.failed, pages=pages)
    return story


def _boot(story: Story, site: Site) -> None:
    story.tell(
        f'starting {DEPLOYMENT}: 3 tensor-parallel ranks on two "nodes", n-gram speculation, overlap schedule (logs: {site.folder}/log)'
    )
    site.begin()
    site.wait_ready(_BOOT_S)
    box = blackbox.read(site.box(0), events=False)
    story.tell(
        f"ready: configuration {box.header.config_digest[:12]}, invocation {box.header.invocation_id[:8]}, ranks 0 and 1 on a, 2 on b"
    )
    verified = site.opsctl("rollout", "verify", deadline_s=180)
    if verified["exit_code"] != ExitCode.DONE:
        raise StageError(f"the baseline is not green: {verified['data'] or verified['errors']}")
    story.facts["baseline_digest"] = verified["data"]["verified"]["digest"]
    story.tell(f"baseline verified by real completions and recorded ({len(verified['data']['checks'])} checks)")


def _wedge(story: Story, site: Site, loop: AgentLoop) -> threading.Thread:
    turns = loop.completed
    wait_for(lambda: blackbox.read(site.box(0), events=False).host.running > 0, 30, "a running turn")
    story.tell("one JSON-schema request goes out beside the loop")
    answers: list[Answer] = []
    hanging = threading.Thread(target=lambda: answers.append(ask(site.url, CONSTRAINED, timeout_s=180)), daemon=True)
    sent = time.monotonic()
    hanging.start()

    def still() -> bool:
        host = blackbox.read(site.box(0), events=False).host
        return host.phase is blackbox.Phase.wait_device and time.monotonic_ns() - host.progress_ns > 1_500_000_000

    wait_for(still, 90, "the wedge")
    host = blackbox.read(site.box(0), events=False).host
    story.wedged = host.progress_ns / 1e9
    story.moment("wedge", story.wedged)
    story.facts["wedge_after_request_s"] = round(story.wedged - sent, 2)
    story.tell(
        f"the server has stopped: no progress since {story.wedged - sent:.1f} s after the request; "
        f"step {host.step}, phase {host.phase.name}"
    )
    health = ask_health(site)
    story.facts["health_in_wedge"] = health
    story.tell(f"GET /health says {health}; the loop has done {loop.completed - turns} turns since and waits")
    return hanging


def ask_health(site: Site) -> int:
    import httpx

    return httpx.get(f"{site.url}/health", timeout=5).status_code


def _captured(story: Story, site: Site, watcher: Any) -> None:
    declared = watcher.wait("stall_declared", _STALL_S + 30)
    story.moment("detected", declared["mono_s"])
    story.tell(f"hang-monitor: stall declared, {declared['quiet_s']} s without progress, {declared['held']} requests held")
    captured = watcher.wait("captured", _WATCHDOG_S)
    story.moment("captured", captured["mono_s"])
    story.tell(f"hang-monitor: bundle of {captured['items']} items in {captured['seconds']} s: {captured['bundle']}")
    verdict = watcher.wait("verdict", 30)
    story.moment("named", verdict["mono_s"])
    story.facts.update(bundle=captured["bundle"], verdict=verdict["verdict"], confidence=verdict["confidence"], runbook=verdict["runbook"],
                       evidence=[item["text"] for item in verdict["evidence"] if item["for"]])  # fmt: skip
    story.tell(f"verdict: {verdict['verdict']} (confidence {verdict['confidence']:.2f}), runbook {verdict['runbook']}")
    for item in verdict["evidence"]:
        story.tell(f"   {'for' if item['for'] else 'against'}: {item['text']}  [{item['artefact']}]")
    left = _WATCHDOG_S - (captured["mono_s"] - story.wedged)
    story.facts["before_watchdog_s"] = round(left, 1)
    story.tell(f"captured {left:.0f} s before the watchdog ({_WATCHDOG_S} s) would have killed the evidence")


def _hasty_change(story: Story, site: Site, loop: AgentLoop) -> None:
    story.tell("first try, in a hurry: opsctl rollout apply --set disable-overlap-schedule --incident")
    begun = time.monotonic()
    answer = site.opsctl(
        "rollout", "apply", "--set", "disable-overlap-schedule", "--incident", "--reason", "hurry", "--yes",
        deadline_s=_ROLLOUT_S, heard=_course(story),
    )  # fmt: skip
    _tell_rollout(story, answer)
    if answer["exit_code"] != ExitCode.REVERTED:
        raise StageError(f"the hasty change ended with exit code {answer['exit_code']}, not {int(ExitCode.REVERTED)}: {answer['errors']}")
    story.moment("reverted")
    story.facts["hasty"] = {
        "seconds": round(time.monotonic() - begun, 1),
        "why": answer["data"]["why"],
        "page_sent": answer["data"]["page_sent"],
    }
    since = loop.completed
    wait_for(lambda: loop.completed > since, 60, "a turn of the loop after the revert")
    story.tell("the loop goes on: the revert serves")


def _fix(story: Story, site: Site, loop: AgentLoop) -> None:
    story.tell("the runbook's fix: opsctl rollout apply --set grammar-backend=none --incident")
    story.tell("its clients of JSON will get 400, which is agreed to for a month: --expect-change 'scan=http 400' --review-by ...")
    review = (datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)).isoformat()
    answer = site.opsctl(
        "rollout", "apply", "--set", "grammar-backend=none", "--expect-change", "scan=http 400", "--review-by", review,
        "--incident", "--reason", "hang_grammar_barrier", "--yes",
        deadline_s=_ROLLOUT_S, heard=_course(story),
    )  # fmt: skip
    _tell_rollout(story, answer)
    if answer["exit_code"] != ExitCode.DONE:
        raise StageError(f"the fix ended with exit code {answer['exit_code']}: {answer['errors']}")
    story.moment("fixed")
    since = loop.completed
    wait_for(lambda: loop.completed > since, 60, "a turn of the loop after the fix")
    refused = ask(site.url, CONSTRAINED, timeout_s=30)
    story.facts["constrained"] = {"status": refused.status, "seconds": round(refused.seconds, 3), "message": refused.text}
    if refused.status != 400 or refused.seconds > 1:
        raise StageError(f"the constrained request got {refused.status} after {refused.seconds:.2f} s: {refused.text}")
    story.tell(f"the constrained request now gets {refused.status} in {refused.seconds * 1000:.0f} ms: {refused.text}")
    since = loop.completed
    wait_for(lambda: loop.completed >= since + 2, 120, "two more turns of the loop")
    story.moment("verified")
    story.tell(f"the loop goes on beside it: {loop.completed} turns in all")


def _course(story: Story) -> Callable[[str], None]:
    """Tells what a rollout says as it says it, from where its plan has been shown."""
    begun = False

    def heard(line: str) -> None:
        nonlocal begun
        if begun and line.strip():
            story.tell(f"   {line.strip()}")
        begun = begun or line.startswith("plan ")

    return heard


def _tell_rollout(story: Story, answer: dict[str, Any]) -> None:
    data = answer["data"]
    if not data:
        raise StageError(f"rollout: {answer['errors']}")
    out = f", without service for {data['without_service_s']:.1f} s" if data["without_service_s"] is not None else ""
    why = f" ({data['why']})" if data["why"] else ""
    story.tell(f"rollout {data['state']}{why}, exit code {answer['exit_code']}{out}")


def table(story: Story) -> str:
    """The moments, for a person."""
    lines = ["", f"{'moment':<12} {'after the wedge':>16}"]
    lines += [f"{name:<12} {at:>14.1f} s" for name, at in story.moments.items()]
    lines += ["", f"bundle  {story.facts.get('bundle', '-')}", f"folder  {story.facts.get('folder', '-')}"]
    return "\n".join(lines)
