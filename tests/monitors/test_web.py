"""A request has one deadline, whatever the server does meanwhile."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

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


def test_a_tls_handshake_that_drips_is_given_up_at_the_deadline() -> None:
    hello = b"\x16\x03\x03\x3f\xff"  # a handshake record of 16,383 bytes, of which one comes now and then
    with dripping(hello) as url:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            web.ask(url.replace("http://", "https://"), deadline_s=0.3)
        assert time.monotonic() - begun < 5


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_server_behind_tls_is_asked_and_one_that_nobody_vouches_for_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                    "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
                   check=True, capture_output=True, timeout=30)  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.socket = context.wrap_socket(made.socket, server_side=True)
    made.handle_error = lambda *_: None  # type: ignore[method-assign]  # who is not trusted hangs up
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"https://localhost:{made.server_port}/x"
        with pytest.raises(ssl.SSLCertVerificationError):
            web.ask(url, deadline_s=10)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert web.ask(url, deadline_s=10) == (200, b"page")
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def test_a_name_that_nobody_resolves_is_given_up_at_the_deadline_and_costs_one_thread(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    """The resolver is the edge that this machine lacks: one that does not answer."""
    silent, known, asked = threading.Event(), socket.getaddrinfo, list[str]()

    def getaddrinfo(host: str, port: int, *rest: Any, flags: int = 0, **more: Any) -> Any:
        if flags & socket.AI_NUMERICHOST or host != "gone.example":
            return known("127.0.0.1" if host == "there.example" else host, port, *rest, flags=flags, **more)
        asked.append(host)
        assert silent.wait(30)
        raise socket.gaierror(socket.EAI_NONAME, "nobody has this name")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            web.ask("http://gone.example/", deadline_s=0.2)
    assert asked == ["gone.example"]
    silent.set()
    for thread in threading.enumerate():
        if thread.name == "resolve gone.example":
            thread.join(10)
    with pytest.raises(OSError, match="nobody has this name"):
        web.ask("http://gone.example/", deadline_s=10)
    assert web.ask(server.replace("127.0.0.1", "there.example") + "/x", deadline_s=10) == (200, b"page")


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
