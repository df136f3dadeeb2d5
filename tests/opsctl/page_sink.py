"""A receiver of pages as a process of its own: ``page_sink.py ADDRESS PORT FILE`` appends each page to FILE."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with Path(sys.argv[3]).open("ab") as file:
            file.write(body.replace(b"\n", b" ") + b"\n")
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever(poll_interval=0.05)
