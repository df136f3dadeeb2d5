"""A server that never ends what it says, and says it a byte at a time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BEGINNINGS = {"headers": HEAD + b"X-Long: ", "body": HEAD + b"Content-Length: 100000\r\n\r\n", "body without a length": HEAD + b"\r\n"}


@contextlib.contextmanager
def dripping(beginning: bytes) -> Iterator[str]:
    """Its URL. ``beginning`` comes at once, then a space each 50 ms."""
    over = threading.Event()
    threads = []

    def drip(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(beginning)
            while not over.wait(0.05):
                connection.sendall(b" ")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                thread = threading.Thread(target=drip, args=(connection,))
                thread.start()
                threads.append(thread)

    listener = socket.create_server(("127.0.0.1", 0))
    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (accepting, *threads):
            thread.join(10)
