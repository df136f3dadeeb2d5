"""A request has one deadline, whatever the server does meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from monitors.observe import probe, web
from tests.drip import BEGINNINGS, dripping


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_server_that_drips_is_given_up_at_the_deadline(beginning: bytes) -> None:
    with dripping(beginning) as url:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            web.ask(f"{url}/metrics", deadline_s=0.3)
        assert probe.ask(url, "/health", deadline_s=0.2).status == 0
        assert time.monotonic() - begun < 5


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        moved = {"/metrics": "/metrics/", "/elsewhere": "http://other.invalid/", "/round": "/round"}.get(self.path, "")
        self.send_response(307 if moved else 200)
        if moved:
            self.send_header("Location", moved)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"page")

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[str]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_redirect_is_followed_on_the_same_host_and_no_further(server: str) -> None:
    assert web.ask(f"{server}/metrics", deadline_s=5) == (200, b"page")
    assert web.ask(f"{server}/elsewhere", deadline_s=5) == (307, b"page")
    assert web.ask(f"{server}/round", deadline_s=5)[0] == 307
    assert web.ask(f"{server}/long", deadline_s=5, most=2) == (200, b"pa")


def test_what_is_no_http_and_what_is_no_url_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def garbage() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x00\x01\x02 no http\r\n\r\n")

        thread = threading.Thread(target=garbage)
        thread.start()
        with pytest.raises(OSError, match="no HTTP answer"):
            web.ask(f"http://127.0.0.1:{listener.getsockname()[1]}/", deadline_s=5)
        thread.join()
    with pytest.raises(ValueError, match="no http"):
        web.ask("localhost:30000/metrics", deadline_s=5)
