"""A gateway as clients have one: it hands on to the server, and answers by itself where it has learned to."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


class Gateway:
    """``hosted``: it answers everything itself. ``falls_back_on``: statuses of the server that it answers over."""

    def __init__(self, upstream: str, *, hosted: bool = False, falls_back_on: tuple[int, ...] = ()) -> None:
        self.hosted, self.falls_back_on = hosted, falls_back_on
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = httpx.get(f"{upstream}{self.path}", timeout=10)
                self._give(found.status_code, found.content)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, content = 200, b""
                if not gateway.hosted:
                    keep = {name: self.headers[name] for name in ("Authorization", "User-Agent", "Content-Type") if name in self.headers}
                    found = httpx.post(f"{upstream}{self.path}", content=body, headers=keep, timeout=10)
                    status, content = found.status_code, found.content
                if gateway.hosted or status in gateway.falls_back_on:
                    status, content = 200, json.dumps(_elsewhere()).encode()
                self._give(status, content)

            def _give(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        ThreadingHTTPServer.daemon_threads = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _elsewhere() -> dict[str, Any]:
    """Under the served model's name, as gateways do."""
    message = {"role": "assistant", "content": '{"colour": "green"}'}
    return {"id": "x", "model": "contract", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
