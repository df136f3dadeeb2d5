"""A gateway as clients have one, on a stage: it hands on to the server, and answers by itself where it has learned to.

What answers by itself stands for somebody else's hosted model, which a stage does not have: one fixed answer under the
served model's name, as gateways give it.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

_KEPT = ("Authorization", "User-Agent", "Content-Type")


class Gateway:
    """``hosted``: it answers everything itself. ``falls_back_on``: statuses of the server that it answers over.
    ``answered_elsewhere`` counts what the server did not answer."""

    def __init__(
        self, upstream: str, *, hosted: bool = False, falls_back_on: tuple[int, ...] = (), model: str = "default", upstream_s: float = 120,
    ) -> None:  # fmt: skip
        self.hosted, self.falls_back_on, self.answered_elsewhere = hosted, falls_back_on, 0
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._give(*gateway._upstream("GET", f"{upstream}{self.path}", b"", {}, upstream_s))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, content = 200, b""
                if not gateway.hosted:
                    keep = {name: self.headers[name] for name in _KEPT if name in self.headers}
                    status, content = gateway._upstream("POST", f"{upstream}{self.path}", body, keep, upstream_s)
                if gateway.hosted or status in gateway.falls_back_on:
                    gateway.answered_elsewhere += 1
                    status, content = 200, json.dumps(_elsewhere(model)).encode()
                self._give(status, content)

            def _give(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                return

        ThreadingHTTPServer.daemon_threads = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_port}"
        self.url = f"{self.base}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def _upstream(self, method: str, url: str, body: bytes, headers: dict[str, str], deadline_s: float) -> tuple[int, bytes]:
        try:
            with httpx.Client(timeout=deadline_s, trust_env=False) as client:
                found = client.request(method, url, content=body, headers=headers)
        except httpx.HTTPError as error:
            return 502, json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}}).encode()
        return found.status_code, found.content

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _elsewhere(model: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": '{"colour": "green"}'}
    return {"id": "x", "model": model, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
