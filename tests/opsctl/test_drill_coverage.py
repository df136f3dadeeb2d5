"""Every fault of the engine and every runbook has a drill, or the page on drills says why not."""

from __future__ import annotations

from pathlib import Path

from engine.faults import KINDS
from opsctl.playbooks import lint
from opsctl.playbooks.schema import Playbook
from opsctl.runbooks.document import read

ROOT = Path(__file__).resolve().parents[2]
DRILLS: list[Playbook] = [lint.read(path).playbook for path in sorted((ROOT / "playbooks").glob("drill-*.yaml"))]


def test_every_runbook_has_a_drill_or_a_reason() -> None:
    practised = {playbook.drill.runbook for playbook in DRILLS if playbook.drill}
    page = (ROOT / "docs/drills.md").read_text().partition("## Runbooks without a drill")[2]
    excused = {path.stem for path in (ROOT / "runbooks").glob("*.md") if f"| `{path.stem}` |" in page}
    assert practised | excused == {"", *(path.stem for path in (ROOT / "runbooks").glob("*.md"))}
    assert not practised & excused


def test_every_fault_of_the_engine_is_injected_by_a_drill() -> None:
    injected = set()
    for playbook in DRILLS:
        assert playbook.drill is not None
        hand = playbook.drill.by_hand
        changes = [step.rollout for step in playbook.method if step.rollout is not None] + ([hand] if hand else [])
        injected |= {step.fault for step in playbook.method} | {str(change.set.get("fault", "")) for change in changes}
        injected |= set(playbook.drill.server)
    assert {spec.partition(":")[0] for spec in injected} >= set(KINDS)


def test_what_a_drill_skips_approves_and_fills_in_is_there_in_its_runbook() -> None:
    for playbook in DRILLS:
        drill = playbook.drill
        assert drill is not None
        if not drill.runbook:
            continue
        book = read(ROOT / "runbooks" / f"{drill.runbook}.md")
        assert set(drill.skip) <= {step.name for step in book.steps}, playbook.name
        assert set(drill.approve) <= set(book.approvals), playbook.name
        assert set(drill.values) <= {name for step in book.steps for name in step.variables}, playbook.name
