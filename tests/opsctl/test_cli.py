"""The command line in this process, with streams of our own."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsctl import cli, commandline
from opsctl.service.embedded import EmbeddedService
from tests.opsctl.site import Ran, Site, wait_until

STEADY = Path(__file__).parent / "steady.py"


def opsctl(env: dict[str, str], *args: str) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    code = cli.main(args, env, stdin=io.StringIO(), stdout=out, stderr=err)
    return Ran(int(code), out.getvalue(), err.getvalue())


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    services = tmp_path / "services"
    services.mkdir()
    (services / "s.toml").write_text(f"argv = {json.dumps([sys.executable, str(STEADY), 'serve'])}\nrestart_s = 0.1\n")
    found = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run"), "OPSCTL_SERVICES": str(services)}
    yield found
    service = EmbeddedService(services, "s", found)
    service.end()
    wait_until(lambda: service.ended)


def test_a_service_is_started_restarted_shown_and_stopped_with_its_supervisor(env: dict[str, str]) -> None:
    started = opsctl(env, "service", "start", "s", "--json")
    assert started.code == 0, started.err
    assert started.data["state"] == "active" and started.data["argv"][-1] == "serve"
    assert opsctl(env, "service", "start", "s", "--json").data["invocation_id"] == started.data["invocation_id"]
    restarted = opsctl(env, "service", "restart", "s", "--json")
    assert restarted.data["invocation_id"] != started.data["invocation_id"]
    assert restarted.data["invocation_id"] in opsctl(env, "service", "log", "s").out
    assert started.data["invocation_id"] in opsctl(env, "service", "log", "s", "--invocation", started.data["invocation_id"]).out
    assert "active" in opsctl(env, "service", "status", "s").out
    stopped = opsctl(env, "service", "stop", "s", "--json")
    assert stopped.code == 0 and stopped.data["state"] == "inactive"


def test_a_service_that_keeps_failing_ends_the_wait_with_its_last_lines(env: dict[str, str]) -> None:
    path = Path(env["OPSCTL_SERVICES"]) / "s.toml"
    path.write_text(path.read_text().replace('"serve"', '"serve", "--raise"'))
    ran = opsctl(env, "service", "start", "s", "--json")
    assert ran.code == 2
    assert "ValueError: of this very start" in ran.errors[0]["message"]


def test_a_group_that_cannot_start_is_told_at_once_with_the_reason_and_a_stopped_one_leaves_no_process(
    env: dict[str, str], tmp_path: Path
) -> None:
    def file(command: str) -> str:
        path = tmp_path / "fleet.toml"
        path.write_text(f'''[deployment.d]
engine = "lastbatch"
api = "http://127.0.0.1:9"
service = "embedded"
[[deployment.d.node]]
name = "here"
[[deployment.d.node.service]]
unit = "one"
ranks = [0]
run_dir = "{tmp_path}/one"
log = "{tmp_path}/one.log"
command = {command}
args = []
''')
        return str(path)

    def supervisors() -> list[str]:
        return [
            line for line in map(_read, Path("/proc").glob("[0-9]*/cmdline")) if "opsctl.service.launch" in line and str(tmp_path) in line
        ]

    ran = opsctl(env, "service", "start-group", "--fleet", file('["/nowhere/server"]'), "--deadline-s", "60", "--json")
    assert ran.code == 2 and "Cannot start /nowhere/server" in ran.errors[0]["message"]
    assert "FAILED" in opsctl(env, "rollout", "status", "--fleet", str(tmp_path / "fleet.toml")).out
    ran = opsctl(env, "rollout", "verify", "--fleet", str(tmp_path / "fleet.toml"), "--json")
    assert ran.code == 2 and "/nowhere/server" in ran.errors[0]["message"]
    assert opsctl(env, "service", "stop-group", "--fleet", str(tmp_path / "fleet.toml")).code == 0
    wait_until(lambda: not supervisors())
    ran = opsctl(env, "service", "start-group", "--fleet", file(json.dumps([sys.executable, str(STEADY), "serve"])), "--json")
    assert ran.code == 0 and ran.data["services"]["one"]["state"] == "active", ran.err
    assert supervisors()
    assert opsctl(env, "service", "stop-group", "--fleet", str(tmp_path / "fleet.toml")).code == 0
    wait_until(lambda: not supervisors())


def _read(path: Path) -> str:
    try:
        return path.read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["service", "status", "nobody"], 2, "nobody.toml"),
        (["rollout", "status", "--fleet", "no.toml"], 2, "no.toml"),
        (["rollout", "apply", "--nonsense"], 2, "--nonsense"),
        (["frobnicate"], 2, "frobnicate"),
    ],
)
def test_what_cannot_be_done_is_one_error_with_its_place_in_text_and_in_json(
    env: dict[str, str], args: list[str], code: int, says: str
) -> None:
    text = opsctl(env, *args)
    assert text.code == code and says in text.err and text.out == ""
    envelope = json.loads(opsctl(env, *args, "--json").out)
    assert set(envelope) == {"schema", "command", "status", "exit_code", "data", "errors"}
    assert envelope["status"] == "error" and envelope["exit_code"] == code and says in envelope["errors"][0]["message"]


def test_every_command_has_a_help_text(env: dict[str, str]) -> None:
    for words in ([], ["rollout"], ["service"], ["rollout", "apply"], ["rollout", "plan"], ["capture"], ["version"]):
        ran = opsctl(env, *words, "--help")
        assert ran.code == 0 and "Usage: opsctl" in ran.out


def test_a_capture_on_demand_is_a_bundle_with_its_verdict(make_site: type[Site]) -> None:
    site: Site = make_site()
    fleet = site.folder / "fleet.toml"
    fleet.write_text(fleet.read_text().replace("unit = 'node0'", f"unit = 'node0'\nrun_dir = '{site.folder}/boxes/node0'"))
    out, err = io.StringIO(), io.StringIO()
    args = ["capture", "--fleet", str(fleet), "--bundle-dir", str(site.folder / "bundles"), "--budget-s", "20", "--json"]
    assert cli.main(args, site.env, stdin=io.StringIO(), stdout=out, stderr=err) == 0, err.getvalue()
    data = json.loads(out.getvalue())["data"]
    assert (Path(data["bundle"]) / "manifest.json").is_file()
    assert data["verdict"] and data["runbook"].startswith("runbooks/")


def _options(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, below in getattr(command, "commands", {}).items():
        yield from _options(below, f"{path} {name}")
    yield from ((path, option) for option in command.params)


def test_every_number_of_a_command_line_has_a_least_so_that_none_below_zero_is_taken() -> None:
    free = [f"{path} {option.opts[0]}" for name, program in commandline.programs().items() for path, option in _options(program, name)
            if option.type_descriptor.annotation in (int, float) and option.min is None]  # fmt: skip
    assert free and all(one.endswith(" --seed") for one in free), free


@pytest.mark.parametrize("words", [("rollout", "plan", "--throughput-allowance", "-5"), ("rollout", "plan", "--throughput-allowance=200"),
                                   ("rollout", "apply", "--lease-s", "0"), ("rollout", "verify", "--stable-s", "-1"),
                                   ("rollout", "abort", "--lock-wait", "-1"), ("capture", "--budget-s", "-3"),
                                   ("rollout", "plan", "--throughput-allowance", "nan")])  # fmt: skip
def test_a_number_out_of_range_is_refused_by_the_name_of_its_option(words: tuple[str, ...], tmp_path: Path) -> None:
    ran = opsctl({"XDG_STATE_HOME": str(tmp_path)}, *words, "--json")
    option = next(word.partition("=")[0] for word in words if word.startswith("--"))
    assert ran.code == 2 and option in ran.errors[0]["message"], ran
