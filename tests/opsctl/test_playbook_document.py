"""Playbooks are found wrong by day, with file, line and what was meant."""

from __future__ import annotations

import datetime
import io
from pathlib import Path

import pytest

from opsctl import cli, commandline
from opsctl.library import NotFound, Shelf
from opsctl.playbooks import actions, lint, needs
from opsctl.playbooks.actions import Place
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


def test_the_list_says_what_a_playbook_waits_for(tmp_path: Path) -> None:
    out = io.StringIO()
    assert cli.main(["playbook", "list"], {"HOME": str(tmp_path)}, stdin=io.StringIO(), stdout=out, stderr=io.StringIO()) == 0
    lines = out.getvalue().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("disable-speculation-above-batch "))
    assert lines[at + 1].strip() == "waiting, it needs flag speculative-disable-by-batch-size: lastbatch has no such flag yet"


def test_a_rollout_playbook_gives_its_edits_and_another_kind_says_how_to_run_it() -> None:
    found = parse(GOOD, "good.yaml").playbook
    assert list(edits(found)) == [Edit("tp", unset=True), Edit("grammar-backend", "none"), Edit("disable-overlap-schedule")]
    assert change(found).env == {"A": "1"} and not change(found).incident
    with pytest.raises(ValueError, match="opsctl playbook run respond-to-wedge"):
        edits(lint.read(PACKAGED["respond-to-wedge"]).playbook)


WHOLE = GOOD.replace(
    'env: {A: "1"}',
    """env: {A: "1"}
      overlay: [/srv/patched.py=/opt/engine/sampler.py]
      remove_overlay: [/opt/engine/old.py]
      image: registry/lastbatch:2
      package: /opt/engine-2
      model: /models/b
      unit_file: [/srv/flash.service, router.service=/srv/router.service]
      allow_red: true
      no_revert_target: true
      boot_deadline_s: 300
      stable_s: 0
      lease_s: 30
      hold_s: 600
      failure_budget: 1
      throughput_allowance_pct: 5
      expect_change: {scan: http 400, "*": expected}
      review_in_days: 30""",
)


def test_a_playbook_says_whatever_a_rollout_can_be_told(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(WHOLE)
    assert lint.problems(tmp_path / "good.yaml") == []
    step = parse(WHOLE, "good.yaml").playbook.method[0]
    said = actions.words(step, Place("f", "d", today=datetime.date(2026, 11, 30)), "good")
    given = " ".join(said)
    for option in commandline.programs()["opsctl"].commands["rollout"].commands["plan"].params:
        word = option.opts[0]
        if word not in ("--playbook", "--reason", "--json", "--incident"):
            assert word in said, f"a playbook cannot say {word}"
    assert "--unit-file /srv/flash.service --unit-file router.service=/srv/router.service" in given
    assert "--expect-change scan=http 400 --expect-change *=expected --review-by 2026-12-30" in given
    assert "--stable-s 0.0" in given and "--allow-red --no-revert-target" in given


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("=/opt/engine/sampler.py", "=sampler.py", "rollout.overlay: /srv/patched.py=sampler.py: write FILE=TARGET, both absolute"),
        ("[/srv/flash.service,", "[flash.service,", "rollout.unit_file: flash.service: write FILE or UNIT=FILE, the file an absolute path"),
        ("scan: http 400", "scan: html", '"html" is no expectation; use "text"'),
        ('"*": expected', '"*": json', "*: callers that are not named can get what is expected of them, or a refusal"),
        ("      review_in_days: 30", "", "expect_change goes with one of review_by and review_in_days"),
        ("review_in_days: 30", "review_in_days: 30\n      review_by: 2030-01-01", "expect_change goes with one of review_by"),
        ("throughput_allowance_pct: 5", "throughput_allowance_pct: -5", "throughput_allowance_pct: -5: Input should be greater than"),
        ("lease_s: 30", "lease_s: .nan", "lease_s: nan: Input should be"),
        ("failure_budget: 1", "failure_budgets: 1", 'unknown key; did you mean "failure_budget"?'),
    ],
)
def test_what_is_wrong_in_a_change_is_named(old: str, new: str, says: str) -> None:
    assert old in WHOLE
    assert any(says in line for line in told(WHOLE.replace(old, new, 1))), told(WHOLE.replace(old, new, 1))


def test_a_change_by_hand_is_one_of_flags_and_variables() -> None:
    text = PACKAGED["drill-crash-loop"].read_text()
    assert "  by_hand:\n" in text
    wrong = text.replace("  by_hand:\n", "  by_hand:\n    model: /m\n")
    assert any("model: a change by hand is one of set, unset and env" in line for line in told(wrong, "drill-crash-loop"))


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
    with pytest.raises(OSError, match="OPSCTL_PLAYBOOKS names no folder"):
        Shelf.of("playbooks", ".yaml", {"OPSCTL_PLAYBOOKS": str(tmp_path / "none")})
    with pytest.raises(NotFound, match='did you mean "respond-to-wedge"'):
        shelf.find("respond-to-wegde")
