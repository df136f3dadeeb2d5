"""``opsctl capture``: the bundle that the hang monitor takes, on demand and by the same code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from monitors import fleet, report
from monitors.capture import archive, bundle
from monitors.capture.redact import Policy, redact
from monitors.exit_codes import ExitCode
from opsctl.answer import Answer


def capture(
    fleet_path: str, deployment: str, env: Mapping[str, str], *, reason: str, budget_s: float, native: bool, root: Path | None,
    fail_on_verdict: bool, include_prompts: bool = False, redact_ip: bool = False, core_dump: bool = False, say: Callable[[str], None],
) -> Answer:  # fmt: skip
    """Take a bundle and judge it.

    Raises:
        FleetError: the fleet file cannot be used. OSError: the bundle cannot be written.
    """
    found = fleet.load(fleet_path)
    one = found.one(deployment)
    reason, _ = redact(reason.encode(errors="backslashreplace").decode(), "reason")  # it names the bundle's folder too
    text = Path(fleet_path).read_text()
    policy = Policy(include_prompts, redact_ip or found.capture.redact_ip)
    taken = bundle.capture(one, reason=reason, budget_s=budget_s, root=root or fleet.bundle_root(one, env), native=native, policy=policy,
                           core_dump=core_dump or found.capture.cuda_core_dump, fleet_text=text, say=say)  # fmt: skip
    page = report.write(taken.folder)
    packed = archive.pack(taken.folder) if found.capture.archive else None
    verdict = taken.verdict.to_json()
    data = {**verdict, "bundle": str(taken.folder), "archive": str(packed or ""), "report": str(page),
            "seconds": round(taken.seconds, 3), "items": msgspec.to_builtins(taken.items)}  # fmt: skip
    lines = [
        f"{verdict['verdict']}  (confidence {verdict['confidence']:.2f})",
        f"bundle {taken.folder}, {len(taken.items)} items in {taken.seconds:.1f} s",
    ]
    lines += [f"  {'for    ' if item['for'] else 'against'}  {item['text']}" for item in verdict["evidence"]]
    lines += [f"  not taken: {gap.probe}: {gap.reason}" for gap in taken.gaps]
    lines += [f"report {page}", f"runbook {verdict['runbook']}"]
    code = ExitCode.FOUND if fail_on_verdict and taken.verdict.verdict.is_alarm else ExitCode.DONE
    return Answer("capture", data, "\n".join(lines), code)
