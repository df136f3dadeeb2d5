"""A small real HTTP server that streams as OpenAI-compatible ones do, with troubles that a request's body may ask for.

    trouble: cut | empty | deaf | garbage | status:503
    token_s: time of a token, instead of the server's own

``refuses`` answers constrained requests with 400, ``wedges`` stops every stream for good once a constrained request
decodes beside an unconstrained one: what the incident's server did. ``lapses``: after so many unconstrained requests it
answers them with 503. ``context``: a longer prompt is a 400, as servers answer
it. ``together``: nothing is answered before so many requests are open.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StreamServer:
    """``most_open`` is the most requests that were open at once; ``bodies`` is all that was asked."""

    def __init__(self, *, port: int = 0, token_s: float = 0.002, refuses: bool = False, wedges: bool = False,
                 lapses: int = 1 << 30, context: int = 1 << 30, together: int = 0, loading: int = 0) -> None:  # fmt: skip
        self.token_s, self.refuses, self.wedges, self.lapses, self.context = token_s, refuses, wedges, lapses, context
        self.longest, self.together, self.loading = 0, together, loading
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0
        self.decoding = {True: 0, False: 0}
        self.lock = threading.Lock()
        self.wedged = threading.Event()
        self.closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.give(200, {"data": [{"id": "small"}]} if self.path == "/v1/models" else {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.bodies.append(body)
                    outer.open += 1
                    outer.most_open = max(outer.most_open, outer.open)
                try:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        outer.answer(self, body)
                finally:
                    with outer.lock:
                        outer.open -= 1

            def give(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 512
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that leaves is what some tests do

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def answer(self, http: Any, body: dict[str, Any]) -> None:
        trouble, constrained = body.get("trouble", ""), "response_format" in body
        until = time.monotonic() + 20
        while self.most_open < self.together and time.monotonic() < until:
            time.sleep(0.01)
        if trouble.startswith("status:"):
            http.give(int(trouble.split(":")[1]), {"error": {"message": "too busy\nsecond line", "type": "server_error"}})
            return
        if constrained and self.refuses:
            http.give(400, {"error": {"message": "Grammar-based generation is not supported"}})
            return
        if not constrained and sum("response_format" not in one for one in self.bodies) > self.lapses:
            http.give(503, {"error": {"message": "no room"}})
            return
        if len(self.bodies) <= self.loading:
            http.give(503, {"error": {"message": "loading"}})
            return
        if trouble == "deaf":
            self.closing.wait(30)
            return
        count = int(body["max_tokens"])
        pieces = ['{"a": ', "1", "}"] if constrained else [f"w{n} " for n in range(count)]
        if trouble == "garbage":
            pieces = ["no", " JSON"]
        prompt = body.get("prompt") or " ".join(m["content"] for m in body["messages"])
        usage = {"prompt_tokens": 10 + round(1.5 * len(prompt.split())), "completion_tokens": len(pieces)}
        if usage["prompt_tokens"] + count > self.context:
            http.give(400, {"error": {"message": "longer than the context"}})
            return
        self.longest = max(self.longest, usage["prompt_tokens"])
        finish = "tool_calls" if "tools" in body else "stop" if constrained or trouble == "garbage" else "length"
        if not body.get("stream"):
            message = {"role": "assistant", "content": "" if trouble == "empty" else "".join(pieces)}
            http.give(200, {"choices": [{"index": 0, "message": message, "text": message["content"], "finish_reason": finish}],
                            "usage": usage, "system_fingerprint": "fp-small"})  # fmt: skip
            return
        http.send_response(200)
        http.send_header("Content-Type", "text/event-stream")
        http.send_header("Connection", "close")
        http.end_headers()
        for piece in self._decode(pieces, constrained, float(body.get("token_s", self.token_s))):
            if trouble != "empty":
                said = {"tool_calls": [{"index": 0}]} if "tools" in body else {"content": piece}
                self._event(http, {"choices": [{"index": 0, "delta": said, "text": piece, "finish_reason": None}],
                                   "system_fingerprint": "fp-small"})  # fmt: skip
            if trouble == "cut":
                return
        self._event(http, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        self._event(http, {"choices": [], "usage": usage})
        http.wfile.write(b"data: [DONE]\n\n")

    def _decode(self, pieces: list[str], constrained: bool, token_s: float) -> Iterator[str]:
        with self.lock:
            self.decoding[constrained] += 1
        try:
            for piece in pieces:
                time.sleep(token_s)
                with self.lock:
                    if self.wedges and all(self.decoding.values()):
                        self.wedged.set()
                if self.wedged.is_set():
                    self.closing.wait(30)
                    return
                yield piece
        finally:
            with self.lock:
                self.decoding[constrained] -= 1

    def _event(self, http: Any, event: dict[str, Any]) -> None:
        http.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def streaming(**options: Any) -> Iterator[StreamServer]:
    server = StreamServer(**options)
    try:
        yield server
    finally:
        server.close()


def main() -> None:
    """``stream_server.py PORT TOKEN_S``: a process of its own, until SIGTERM. Its first requests find it loading."""
    StreamServer(port=int(sys.argv[1]), token_s=float(sys.argv[2]), loading=3)
    signal.pause()


if __name__ == "__main__":
    main()
