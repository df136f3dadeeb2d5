"""A guarded change of the real engine: two ranks on two embedded services, with a small random model."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_models import tiny_model

from monitors import fleet
from opsctl import cli
from opsctl.rollout import target
from opsctl.service.embedded import EmbeddedService
from tests.opsctl.site import ROOT, Pages, wait_until
from tests.ports import free_port

BOOT_S = 120.0


class Group:
    def __init__(self, folder: Path) -> None:
        self.folder, self.pages = folder, Pages()
        model = tiny_model(folder / "model")
        self.port = free_port(5)  # the API's, and four for the rendezvous
        self.env = {
            **os.environ,
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        nodes = ""
        for number, ranks in enumerate(([0], [1])):
            args = ["--model", str(model), "--tp", "2", "--nnodes", "2", "--node-rank", str(number), "--port", str(self.port),
                    "--dist-init-addr", f"127.0.0.1:{self.port + 1}", "--run-dir", f"{folder}/boxes/{number}", "--max-total-tokens", "4096",
                    "--drain-timeout", "2", "--enable-faults", "--enable-overlap-schedule",
                    "--fault", "decode.crash:when=sequential"]  # fmt: skip
            nodes += (
                f"[[deployment.d.node]]\nname = 'n{number}'\n[[deployment.d.node.service]]\nunit = 's{number}'\nranks = {ranks}\n"
                f"run_dir = '{folder}/boxes/{number}'\nlog = '{folder}/log/{number}.log'\n"
                f"command = {json.dumps([sys.executable, '-m', 'engine.cli', 'serve'])}\nargs = {json.dumps(args)}\n"
            )
        (folder / "fleet.toml").write_text(
            f"[deployment.d]\nengine = 'lastbatch'\napi = 'http://127.0.0.1:{self.port}'\nservice = 'embedded'\nstable_s = 1\n"
            f"boot_deadline_s = {BOOT_S}\n{nodes}[page]\nurls = ['{self.pages.url}']\n"
        )
        found = fleet.load(folder / "fleet.toml")
        managers = target.of(found.one(), found.path, self.env).managers
        self.services = [manager for manager in managers if isinstance(manager, EmbeddedService)]

    def start(self) -> None:
        for service in self.services:
            service.begin_start()
        wait_until(self.answers, BOOT_S, "the group to answer")

    def answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health_scheduler", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def ask_json(self) -> int:
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60) as client:
            body = {"model": client.get("/v1/models").json()["data"][0]["id"], "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": 4, "response_format": {"type": "json_object"}}  # fmt: skip
            return client.post("/v1/chat/completions", json=body).status_code

    def rollout(self, *words: str) -> tuple[int, Any, str]:
        out, err = io.StringIO(), io.StringIO()
        code = cli.main(
            ["rollout", *words, "--fleet", str(self.folder / "fleet.toml"), "--json"], self.env, stdin=io.StringIO(), stdout=out, stderr=err
        )
        return int(code), json.loads(out.getvalue()), err.getvalue()

    def close(self) -> None:
        for service in self.services:
            if token := service.lease_token():
                service.disarm(token)
            service.end()
        wait_until(lambda: all(service.ended for service in self.services), 60, "every supervisor to end")
        self.pages.close()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("group"))
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_the_fix_that_crashes_is_reverted_and_the_one_that_works_is_committed(group: Group) -> None:
    code, answer, err = group.rollout("apply", "--yes", "--set", "disable-overlap-schedule")
    assert code == 3, err
    failed = next(check for check in answer["data"]["checks"] if check["outcome"] == "failed")
    assert any("TypeError" in trace for trace in failed["data"]["tracebacks"]), failed
    assert [check["outcome"] for check in answer["data"]["revert_checks"]] == ["passed"] * 5, err
    assert answer["data"]["page_sent"] is True
    assert group.ask_json() == 200
    code, answer, err = group.rollout("apply", "--yes", "--set", "grammar-backend=none")
    assert code == 0, err
    assert {check["name"]: check["outcome"] for check in answer["data"]["checks"]}["ranks"] == "passed"
    assert group.ask_json() == 400
