"""``opsctl drill``: what it lists, and what it refuses before anything is touched."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from opsctl import cli
from opsctl.drill import history
from opsctl.drill.score import Moments, Score
from opsctl.rollout import lock
from tests.opsctl.site import Ran

FLEET = (
    '[deployment.flash]\nengine = "lastbatch"\napi = "http://127.0.0.1:1"\nallow_faults = {allow}\n[[deployment.flash.node]]\nname = "a"\n'
)


def drill(state: Path, *args: str, stdin: io.StringIO | None = None) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    env = {"XDG_STATE_HOME": str(state), "HOME": str(state)}
    code = cli.main(["drill", *args], env, stdin=stdin or io.StringIO(), stdout=out, stderr=err)
    return Ran(int(code), out.getvalue(), err.getvalue())


def test_two_drills_on_one_deployment_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET.format(allow="true"))
    with lock.held(tmp_path / "lastbatch" / "drills" / "flash", "drill run"):
        ran = drill(tmp_path, "run", "drill-stopped", "--fleet", str(tmp_path / "fleet.toml"))
    assert ran.code == 6 and "another drill is under way (drill run, pid" in ran.err


def test_nothing_is_injected_where_the_deployment_does_not_allow_it(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET.format(allow="false"))
    ran = drill(tmp_path, "run", "drill-stopped", "--fleet", str(tmp_path / "fleet.toml"))
    assert ran.code == 2
    assert "deployment.flash does not say allow_faults = true" in ran.err


def test_attended_without_a_name_one_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET.format(allow="false"))
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    ran = drill(tmp_path, "run", "--attended", "--fleet", str(tmp_path / "fleet.toml"), stdin=terminal)
    assert ran.code == 2 and "does not say allow_faults = true" in ran.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "give names of drills, or --all"),
        (("drill-stopped", "--all"), "give names of drills, or --all"),
        (("drill-stopped", "--attended"), "standard input is no terminal"),
        (("drill-stopped", "--deployment", "flash"), "give --fleet"),
        (("refuse-grammar-at-admission",), "a playbook of kind rollout, no drill"),
        (("drill-stoped",), "no drill 'drill-stoped'; did you mean \"drill-stopped\"?"),
        (("respond-to-wedge",), "a playbook of kind response, no drill"),
    ],
)
def test_what_makes_no_sense_is_refused_and_says_what_to_do(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    ran = drill(tmp_path, "run", *args)
    assert ran.code == 2
    assert says in ran.err


def test_the_list_names_both_causes_where_there_are_two(tmp_path: Path) -> None:
    found = {one["name"]: one for one in json.loads(drill(tmp_path, "list", "--json").out)["data"]}
    both = found["drill-wedge-and-corruption"]
    assert both["verdicts"] + both["also"] == ["health_lies", "hang_tp_desync"]
    assert "health_lies and hang_tp_desync" in drill(tmp_path, "list").out


def test_the_score_of_a_drill_that_there_is_not_is_refused_with_the_near_name(tmp_path: Path) -> None:
    ran = drill(tmp_path, "score", "drill-stoped")
    assert ran.code == 2 and 'did you mean "drill-stopped"?' in ran.err
    ran = drill(tmp_path, "score", "drill-stopped")
    assert ran.code == 0 and "drill-stopped was not played yet" in ran.out


def test_scores_are_shown_drawn_and_reported(tmp_path: Path) -> None:
    played = Score("drill-stopped", "auto", "2026-11-30T05:41:00+00:00", Moments(0.0, 5.0, 8.0, 30.0, 31.0), passed=True, points=100)
    history.add(history.path_of({"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}), played)
    ran = drill(tmp_path, "score", "--plot", str(tmp_path / "trend.svg"), "--report", str(tmp_path / "drills.md"))
    assert ran.code == 0 and "drill-stopped  passed" in ran.out
    assert (tmp_path / "trend.svg").read_text().startswith("<svg")
    assert "| drill-stopped | passed | 100 |" in (tmp_path / "drills.md").read_text()


def test_a_drill_that_was_never_passed_is_overdue(tmp_path: Path) -> None:
    ran = drill(tmp_path, "calendar")
    assert ran.code == 9
    assert {"drill-stopped", "incident-2026-09-27"} <= {line.split()[0] for line in ran.out.splitlines() if "never played" in line}


def test_a_day_has_steps_and_no_moments_that_could_be_drawn(tmp_path: Path) -> None:
    day = Score("incident-2026-09-27", "auto", "2026-11-30T05:41:00+00:00", Moments(), passed=True, points=100)
    history.add(history.path_of({"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}), day)
    assert "incident-2026-09-27  passed" in drill(tmp_path, "score").out
    ran = drill(tmp_path, "score", "--plot", str(tmp_path / "trend.svg"))
    assert ran.code == 2 and "no moments" in ran.err
