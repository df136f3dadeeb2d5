"""Playbooks are found wrong by day, with file, line and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsctl.library import NotFound, Shelf
from opsctl.playbooks import lint, needs
from opsctl.playbooks.document import PlaybookError, parse
from opsctl.playbooks.schema import change, edits
from opsctl.rollout.flags import Edit

GOOD = """\
name: good
kind: rollout
summary: Turn a thing off.
hypothesis:
  - probe: answer
    tolerance: {within_s: 5}
method:
  - name: off
    rollout:
      set: {grammar-backend: none, disable-overlap-schedule: true}
      unset: [tp]
      env: {A: "1"}
    deadline_s: 60
    approval: change-configuration
"""
PACKAGED = Shelf.of("playbooks", ".yaml", {}).all()


def told(text: str, name: str = "good") -> list[str]:
    with pytest.raises(PlaybookError) as found:
        parse(text, f"{name}.yaml")
    return [str(problem) for problem in found.value.problems]


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_playbook_is_well_formed_and_its_commands_exist(name: str) -> None:
    assert lint.problems(PACKAGED[name]) == []


def test_the_playbooks_of_the_incident_ship_and_those_that_wait_say_for_what() -> None:
    assert set(PACKAGED) >= {
        "refuse-grammar-at-admission", "disable-overlap", "plain-restart-prefill-decode", "disable-speculation-above-batch",
        "move-tables-to-ram", "revert-to-last-verified", "respond-to-wedge", "restore-grammar",
    }  # fmt: skip
    waiting = {name: needs.unmet(lint.read(path).playbook, None) for name, path in PACKAGED.items()}
    assert "speculative-disable-by-batch-size: lastbatch has no such flag yet" in waiting["disable-speculation-above-batch"][0]
    assert waiting["move-tables-to-ram"] and not waiting["refuse-grammar-at-admission"]


def test_a_rollout_playbook_gives_its_edits_and_another_kind_says_how_to_run_it() -> None:
    found = parse(GOOD, "good.yaml").playbook
    assert list(edits(found)) == [Edit("tp", unset=True), Edit("grammar-backend", "none"), Edit("disable-overlap-schedule")]
    assert change(found).env == {"A": "1"} and not change(found).incident
    with pytest.raises(ValueError, match="opsctl playbook run respond-to-wedge"):
        edits(lint.read(PACKAGED["respond-to-wedge"]).playbook)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("summary:", "sumary:", 'good.yaml:3: sumary: unknown key; did you mean "summary"?'),
        ("kind: rollout", "kind: rolout", """good.yaml:2: kind: 'rolout': Input should be 'rollout', 'response', 'experiment' or 'drill'; did you mean "rollout"?"""),  # noqa: E501
        ("probe: answer", "probe: anwser", 'good.yaml:5: hypothesis[0]: probe "anwser" is unknown; did you mean "answer"?'),
        ("within_s: 5", "within: 5", "good.yaml:5: hypothesis[0]: probe answer has no tolerance 'within'; it takes: within_s"),
        ("within_s: 5", "within_s: soon", "within_s: 'soon' is no time in seconds"),
        ("    deadline_s: 60\n", "", "good.yaml:8: method[0].deadline_s: this key is needed"),
        ("deadline_s: 60", "deadline_s: -1", "good.yaml:13: method[0].deadline_s: -1: Input should be greater than 0"),
        ("    approval: change-configuration\n", "", "good.yaml:8: method[0]: a rollout changes configuration: say who may agree"),
        ("deadline_s: 60", "run: opsctl version\n    deadline_s: 60", "a step does one thing, this one run and rollout"),
        ("grammar-backend: none", "grammar-backend: false", "grammar-backend: False is no value of a flag"),
        ("env:", "envs:", 'good.yaml:12: method[0].rollout.envs: unknown key; did you mean "env"?'),
        ("kind: rollout", "kind: rollout\nkind: drill", "good.yaml:3: kind: given twice"),
        ("summary: Turn", "summary: [Turn", "good.yaml:4: not YAML"),
        (GOOD, "", "good.yaml:1: a playbook is a mapping"),
        (GOOD, "- a\n", "good.yaml:1: a playbook is a mapping"),
        ("approval:", "expects: 8\n    approval:", "good.yaml:14: method[0].expects: [8] is no exit code"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_line_and_what_was_meant(old: str, new: str, says: str) -> None:
    assert old in GOOD
    assert any(says in line for line in told(GOOD.replace(old, new, 1))), told(GOOD.replace(old, new, 1))


def test_words_that_yaml_takes_for_booleans_stay_words() -> None:
    assert list(edits(parse(GOOD.replace("grammar-backend: none", "grammar-backend: off"), "good.yaml").playbook))[1].value == "off"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("opsctl captur --fleet $FLEET", 'good.yaml:9: method[0].run: opsctl captur: no such command; did you mean "opsctl capture"?'),
        ("opsctl capture --flet $FLEET", "good.yaml:9: method[0].run: opsctl capture: No such option"),
        ("rm -rf /", "rm is no program that a document may run"),
        ("opsctl capture --fleet $FLOTT", "$FLOTT: no value for this variable; there are $FLEET, $DEPLOYMENT"),
        ("opsctl 'capture", "No closing quotation"),
    ],
)
def test_a_command_that_nobody_has_is_found(tmp_path: Path, command: str, says: str) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(f'name: good\nkind: response\nsummary: x\nhypothesis:\n  - probe: health\nneeds: []\nmethod:\n  - name: a\n    run: {command!r}\n    deadline_s: 5\n')  # noqa: E501  # fmt: skip
    assert any(says in str(problem) for problem in lint.problems(path)), lint.problems(path)


def test_a_command_that_is_awaited_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    text = "name: good\nkind: response\nsummary: x\nhypothesis: [{probe: health}]\nNEEDS\n"
    text += "method: [{name: a, run: opsctl divine, deadline_s: 5}]\n"
    path.write_text(text.replace("NEEDS", "needs: [{command: divine}]"))
    assert lint.problems(path) == []
    path.write_text(text.replace("NEEDS", "needs: []"))
    assert len(lint.problems(path)) == 1


def test_a_sites_own_folder_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "playbooks"
    own.mkdir()
    (own / "disable-overlap.yaml").write_text("x")
    (own / "ours.yaml").write_text("x")
    shelf = Shelf.of("playbooks", ".yaml", {}, str(tmp_path / "fleet.toml"))
    assert shelf.find("disable-overlap") == own / "disable-overlap.yaml"
    assert shelf.find("ours") == own / "ours.yaml" and shelf.find("respond-to-wedge") == PACKAGED["respond-to-wedge"]
    assert Shelf.of("playbooks", ".yaml", {"OPSCTL_PLAYBOOKS": str(own)}).site == own
    with pytest.raises(NotFound, match='did you mean "respond-to-wedge"'):
        shelf.find("respond-to-wegde")
