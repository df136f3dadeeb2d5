"""The real engine under two embedded services, two ranks with a small random model, for rollouts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from monitors import fleet
from opsctl import cli
from opsctl.rollout import target
from opsctl.service.embedded import EmbeddedService
from tests.opsctl.site import ROOT, Pages, wait_until
from tests.ports import free_port
from tests.tiny_models import tiny_model

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

    def spawn(self, *words: str) -> subprocess.Popen[str]:
        """opsctl as a process of its own, to be killed."""
        argv = [sys.executable, "-m", "opsctl.cli", "rollout", *words, "--fleet", str(self.folder / "fleet.toml"), "--json"]
        return subprocess.Popen(
            argv, cwd=ROOT, env=self.env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    @property
    def journals(self) -> Path:
        return self.folder / "state" / "lastbatch" / "rollouts" / "d"

    @property
    def running(self) -> list[list[str]]:
        """The arguments of every main process."""
        return [list(service.argv()) for service in self.services]

    def close(self) -> None:
        for service in self.services:
            if token := service.lease_token():
                service.disarm(token)
            service.end()
        wait_until(lambda: all(service.ended for service in self.services), 60, "every supervisor to end")
        self.pages.close()
