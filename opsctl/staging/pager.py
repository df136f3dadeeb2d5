"""Whoever is on call, on a stage: an address that apprise can post to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Pager:
    """Whoever is on call: receives what apprise posts. ``on_page`` takes the title, ``on_text`` title and text, before it."""

    def __init__(
        self, on_page: Callable[[str], None], host: str = "127.0.0.1", on_text: Callable[[str, str], None] = lambda title, text: None
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                page = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()
                on_text(str(page.get("title", "")), str(page.get("message", "")))
                on_page(str(page.get("title", "")))

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
