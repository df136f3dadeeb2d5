"""What the clients of a drill count as a good turn, and who watches whether they are served here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from monitors import fleet
from opsctl.staging.callers import CallerWatch
from opsctl.staging.clients import ScanLoop, ToolLoop
from opsctl.staging.gateway import Gateway
from opsctl.staging.pager import Pager
from opsctl.staging.site import Layout, Site
from opsctl.staging.waiting import StageError, wait_for

Answers = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]

CALL = [{"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}]


def said(content: str | None, *, own: bool = True, **more: Any) -> tuple[int, dict[str, Any]]:
    message = {"role": "assistant", "content": content, **more}
    return 200, {"choices": [{"index": 0, "message": message}], "system_fingerprint": "lb-0123456789ab-01234567" if own else None}


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    """A server that answers what the test says, on a port of the test's own."""
    servers: list[tuple[ThreadingHTTPServer, Thread]] = []

    def begin(answers: Answers) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                status, body = answers(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield begin
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("free", "forced", "good"),
    [
        (said("I do not know."), said(None, tool_calls=CALL), True),
        (said("<function=look_up>\n</function>"), said(None, tool_calls=CALL), False),
        (said("", parse_failures=["a malformed tool call"]), said(None, tool_calls=CALL), False),
        (said("I do not know."), said("", parse_failures=["the answer ended before the tool call had a name"]), False),
        (said("I do not know."), said("Let me look it up."), False),
        (said("I do not know."), (400, {"error": {"message": "tool_choice: no"}}), False),
    ],
)
def test_a_client_with_tools_is_served_when_no_call_is_broken_and_the_one_that_must_come_comes(
    serve: Callable[[Answers], str], free: tuple[int, Any], forced: tuple[int, Any], good: bool
) -> None:
    url = serve(lambda body: forced if body.get("tool_choice") == "required" else free)
    assert ToolLoop(url).turn() is good


def test_an_answer_in_this_models_name_that_another_server_gave_is_no_good_turn(serve: Callable[[Answers], str]) -> None:
    refused = False
    url = serve(lambda body: (400, {"error": {"message": "no grammar here"}}) if refused else said("{}"))
    gateway = Gateway(url, falls_back_on=(400,))
    try:
        scan = ScanLoop(gateway.base)
        assert scan.turn()
        refused = True
        assert not scan.turn()
        assert gateway.answered_elsewhere == 1
    finally:
        gateway.close()


def test_a_watch_of_the_callers_has_a_verdict_once_it_has_ended_and_one_that_says_none_is_an_error() -> None:
    def watch(program: str) -> CallerWatch:
        return CallerWatch(subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    found = watch('input(); print(\'{"data": {"verdict": "hosted_fallback"}}\'); raise SystemExit(9)')
    broken = watch("raise SystemExit(1)")
    try:
        assert found.verdict() == ""
        assert found.process.stdin is not None
        found.process.stdin.write("\n")
        found.process.stdin.close()
        assert wait_for(found.verdict, 20, "the verdict") == "hosted_fallback"
        assert found.verdict() == "hosted_fallback", "asked again"
        broken.process.wait(20)
        with pytest.raises(StageError, match="ended with 1 and no verdict"):
            broken.verdict()
    finally:
        for one in (found, broken):
            one.close()
            assert one.process.stdin is not None
            one.process.stdin.close()


def test_an_outdated_fleet_file_names_another_engine_and_all_else_as_it_is(tmp_path: Path) -> None:
    pager = Pager(lambda title: None)
    try:
        site = Site(tmp_path, {}, pager, Layout("drill", (), nodes=((0, 1, 2),)))
        now, before = (fleet.load(path).one() for path in (site.fleet, site.outdated()))
        site.close()
    finally:
        pager.close()
    assert (now.engine, before.engine) == ("lastbatch", "sglang")
    assert before.model_copy(update={"engine": now.engine}) == now
