"""The real API process with a scripted scheduler behind it, for tests that speak HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from engine import blackbox, config
from engine.flags import parse
from engine.messages import Ready
from engine.text.tokenizer import Tokenizer
from tests.engine.scripted_scheduler import ScriptedScheduler, ready
from tests.tiny_models import tiny_model

INVOCATION = "0123456789abcdef0123456789abcdef"
_BOOT_DEADLINE_S = 60.0


@dataclass
class Api:
    """``log()`` is what it has written so far. ``control``: the launcher's pipe to it."""

    process: subprocess.Popen[bytes]
    scheduler: ScriptedScheduler
    client: httpx.Client
    url: str
    settings: config.Settings
    run_directory: Path
    log_path: Path
    control: int

    def log(self) -> str:
        return self.log_path.read_text()

    def chat(self, content: str = "Hi", **parameters: object) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **parameters})

    def complete(self, prompt: object = "Hi", **parameters: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **parameters})

    def refused(self, answer: httpx.Response, status: int, code: str, param: str | None = None) -> str:
        """Assert the shape of an error; its message."""
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), answer.text
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["message"])


@contextlib.contextmanager
def api_process(folder: Path, *flags: str, env: Mapping[str, str] | None = None, answer: Ready | None = None,
                loading: bool = False, box: bool = True, generation: Mapping[str, object] | None = None) -> Iterator[Api]:  # fmt: skip
    """Boot it on a free port. ``loading``: the scheduler does not say Ready. ``box``: rank 0 has a fresh black box.
    ``generation``: the model's generation_config.json."""
    model = tiny_model(folder / "model")
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    run = folder / "run"
    run.mkdir()
    settings = parse(["--model", str(model), "--port", "0", "--run-dir", str(run), "--served-model-name", "tiny", *flags])
    if box:
        write_box(run, 0, settings)
    log_path = folder / "api.log"
    with (
        tempfile.TemporaryDirectory(prefix="lb-") as sockets,  # short: a socket's path has at most 107 characters
        ScriptedScheduler(Path(sockets), Tokenizer.load(model)) as scheduler,
        log_path.open("wb") as log,
    ):
        reader, writer = os.pipe()
        hears, control = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.server.main"],
            env={
                **os.environ, "LASTBATCH_SETTINGS": settings.to_json(), "LASTBATCH_SOCKETS": sockets, "INVOCATION_ID": INVOCATION,
                "LASTBATCH_READY_FD": str(writer), "LASTBATCH_CONTROL_FD": str(hears), **(env or {}),
            },
            pass_fds=[writer, hears], stderr=log, stdout=log,
        )  # fmt: skip
        os.close(writer)
        os.close(hears)
        try:
            url = _listening(reader, log_path)
            with httpx.Client(base_url=url, timeout=20) as client:
                api = Api(process, scheduler, client, url, settings, run, log_path, control)
                if not loading:
                    scheduler.send(answer or ready())
                    scheduler.wait_for(lambda: client.get("/health").json()["status"] == "ready", "ready")
                yield api
        finally:
            os.close(reader)
            os.close(control)
            process.kill()
            process.wait(10)


def write_box(run: Path, rank: int, settings: config.Settings, *, pid: int | None = None, remote: bool = False) -> blackbox.BlackBox:
    header = blackbox.Header(pid=pid or os.getpid(), rank=rank, world=settings.parallel.tp, config_digest=settings.digest, tp=rank,
                             invocation_id=INVOCATION)  # fmt: skip
    return blackbox.BlackBox(run / f"{'remote-' if remote else ''}rank-{rank}.box", header, settings.declared_json())


def _listening(reader: int, log_path: Path) -> str:
    ready_now, _, _ = select.select([reader], [], [], _BOOT_DEADLINE_S)
    line = os.read(reader, 200).decode() if ready_now else ""
    assert line.startswith("listening "), f"{line!r}; its log: {log_path.read_text()}"
    _, host, port = line.split()
    return f"http://{host}:{port}"
