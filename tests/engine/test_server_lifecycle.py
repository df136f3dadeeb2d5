"""The API process from boot to exit: loading, ready, SIGTERM with work in flight, and the death of its parent."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from engine.flags import parse
from engine.server.listener import listen
from tests.engine.api_process import Api, api_process, write_box
from tests.engine.scripted_scheduler import ready


def begun_stream(api: Api, pool: concurrent.futures.Executor) -> concurrent.futures.Future[str]:
    """The whole text of a streamed completion that has sent its first line."""
    begun = threading.Event()

    def streamed() -> str:
        lines = []
        with httpx.stream("POST", f"{api.url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=20) as answer:
            for line in answer.iter_lines():
                begun.set()
                lines.append(line)
        return "\n".join([*lines, ""])

    text = pool.submit(streamed)
    assert begun.wait(20), "no line of the stream came"
    return text


def test_before_ready_it_answers_and_generates_nothing(tmp_path: Path) -> None:
    with api_process(tmp_path, loading=True) as api:
        assert (api.client.get("/health").status_code, api.client.get("/health").json()) == (200, {"status": "loading"})
        for answer in (api.chat(), api.complete(), api.client.get("/health_generate")):
            assert "loading" in api.refused(answer, 503, "loading")
            assert int(answer.headers["retry-after"]) >= 1
        asked = api.client.get("/health_scheduler")
        assert (asked.status_code, asked.json()["status"]) == (503, "loading")
        box = write_box(api.run_directory, 0, api.settings, pid=2**22 - 1)  # nobody's
        assert api.client.get("/health_scheduler").json()["status"] == "failed"
        box.close()
        assert api.client.get("/server_info").json()["status"] == "loading"
        assert api.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert "lastbatch:ready 0.0" in api.client.get("/metrics").text
        assert api.scheduler.requests == []
        api.scheduler.send(ready())
        api.scheduler.wait_for(lambda: api.chat().status_code == 200, "the first answer")


def test_the_process_has_its_title_keeps_its_environment_and_never_loads_torch(tmp_path: Path) -> None:
    with api_process(tmp_path) as api:
        process = psutil.Process(api.process.pid)
        assert process.cmdline()[0] == "lastbatch::api"
        assert process.environ()["INVOCATION_ID"] == "0123456789abcdef0123456789abcdef"
        assert api.chat().status_code == 200
        assert not [mapping.path for mapping in process.memory_maps() if "libtorch" in mapping.path]


def test_sigterm_lets_running_answers_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    with api_process(tmp_path) as api, concurrent.futures.ThreadPoolExecutor() as pool:
        go_on = False

        def script(request):  # type: ignore[no-untyped-def]
            yield api.scheduler.tokens(request, api.scheduler.tokenizer.encode("first"))
            while not go_on:
                yield None
            yield from api.scheduler.says(" last")(request)

        api.scheduler.script = script
        whole = pool.submit(api.chat)
        stream = begun_stream(api, pool)
        api.scheduler.wait_for(lambda: len(api.scheduler.requests) == 2, "two requests in flight")
        api.process.send_signal(signal.SIGINT)  # of a Ctrl-C that the whole group gets: not for this process
        api.process.terminate()
        api.scheduler.wait_for(lambda: api.client.get("/health").status_code == 503, "the drain")
        answer = api.chat("too late")
        assert int(answer.headers["retry-after"]) >= 1
        api.refused(answer, 503, "draining")
        assert api.process.poll() is None
        go_on = True
        assert whole.result(10).json()["choices"][0]["message"]["content"] == "first last"
        assert stream.result(10).endswith("data: [DONE]\n\n")
        assert api.process.wait(10) == 0


def test_after_the_drain_timeout_the_rest_is_told_and_it_still_exits_0(tmp_path: Path) -> None:
    with api_process(tmp_path, "--drain-timeout", "0.3") as api, concurrent.futures.ThreadPoolExecutor() as pool:
        api.scheduler.script = api.scheduler.hangs_after("first")
        whole = pool.submit(api.chat)
        stream = begun_stream(api, pool)
        api.scheduler.wait_for(lambda: len(api.scheduler.requests) == 2, "two requests in flight")
        api.process.terminate()
        api.refused(whole.result(10), 503, "draining")
        assert '"code":"draining"' in stream.result(10)
        assert api.process.wait(10) == 0
        assert "Traceback" not in api.log()
        assert len(re.findall(r"status=503 in=\d+ out=[1-9]\d* finish=error reason=draining$", api.log(), re.MULTILINE)) == 2


@pytest.mark.parametrize("draining", [False, True])
def test_when_the_engine_broke_whoever_waits_is_told_before_the_end(tmp_path: Path, draining: bool) -> None:
    with api_process(tmp_path) as api, concurrent.futures.ThreadPoolExecutor() as pool:
        api.scheduler.script = api.scheduler.hangs_after("first")
        whole = pool.submit(api.chat)
        stream = begun_stream(api, pool)
        api.scheduler.wait_for(lambda: len(api.scheduler.requests) == 2, "two requests in flight")
        if draining:
            api.process.terminate()
            api.scheduler.wait_for(lambda: api.client.get("/health").status_code == 503, "the drain")
        os.write(api.control, b"rank 1 (pid 7) ended with signal SIGKILL\n")
        message = api.refused(whole.result(10), 503, "engine_ended")
        assert "pid" not in message and int(whole.result().headers["retry-after"]) >= 1
        assert '"code":"engine_ended"' in stream.result(10).splitlines()[-2]
        assert api.process.wait(10) == 1
        assert api.log().count(" finish=error reason=engine_ended") == 2
        assert "cannot go on (rank 1 (pid 7) ended with signal SIGKILL): 2 requests in flight" in api.log()
        assert "Traceback" not in api.log()


def test_an_idle_process_goes_at_once(tmp_path: Path) -> None:
    with api_process(tmp_path) as api:
        assert api.chat().status_code == 200  # and its connection is kept alive
        api.process.terminate()
        assert api.process.wait(5) == 0


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="lb-") as sockets:
        settings = parse(["--model", str(_model(tmp_path)), "--port", "0", "--run-dir", str(tmp_path)])
        program = textwrap.dedent("""
            import os, subprocess, sys
            reader, writer = os.pipe()
            child = subprocess.Popen([sys.executable, "-m", "engine.server.main"], pass_fds=[writer],
                                     env={**os.environ, "LASTBATCH_READY_FD": str(writer)}, stderr=subprocess.DEVNULL)
            assert os.read(reader, 100).startswith(b"listening ")
            print(child.pid, flush=True)
            sys.stdin.read()
            os.kill(os.getpid(), 9)
        """)
        parent = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "LASTBATCH_SETTINGS": settings.to_json(), "LASTBATCH_SOCKETS": sockets},
        )  # fmt: skip
        assert parent.stdout is not None
        with parent.stdout:
            child = psutil.Process(int(parent.stdout.readline()))
            parent.communicate("", timeout=10)
        gone, _ = psutil.wait_procs([child], timeout=5)
        assert gone


@pytest.mark.parametrize(
    ("flags", "env", "word"),
    [([], {"LASTBATCH_MODEL_FOLDER": "/nonexistent"}, "tokenizer.json"), (["--api-key-file", "KEY"], {}, "is empty")],
)
def test_a_setting_that_cannot_be_used_ends_it_with_2_and_the_reason(
    tmp_path: Path, flags: list[str], env: dict[str, str], word: str
) -> None:
    key = tmp_path / "key"
    key.write_text("\n")
    settings = parse(["--model", str(_model(tmp_path)), "--port", "0", *[str(key) if flag == "KEY" else flag for flag in flags]])
    made = {**os.environ, "LASTBATCH_SETTINGS": settings.to_json(), "LASTBATCH_SOCKETS": str(tmp_path), **env}
    ended = subprocess.run([sys.executable, "-m", "engine.server.main"], env=made, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert word in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_is_said_to_be(tmp_path: Path) -> None:
    with api_process(tmp_path) as api:
        port = api.url.rpartition(":")[2]
        settings = parse(["--model", api.settings.model.path, "--port", port])
        made = {**os.environ, "LASTBATCH_SETTINGS": settings.to_json(), "LASTBATCH_SOCKETS": str(tmp_path)}
        ended = subprocess.run([sys.executable, "-m", "engine.server.main"], env=made, capture_output=True, text=True, timeout=20)
        assert ended.returncode == 1
        assert f"--port {port}: cannot listen" in ended.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_the_listener_says_it_is_tcp_so_that_answers_are_not_held_back(host: str) -> None:
    with listen(host, 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
        assert listener.getsockname()[1] > 0


def _model(folder: Path) -> Path:
    from tests.tiny_models import tiny_model

    return tiny_model(folder / "model")
