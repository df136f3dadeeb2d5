"""Tell systemd that the monitor is ready, lives and ends (``Type=notify``); says nothing where nobody listens."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    """``due_s`` is how often the watchdog wants a word: half of its time; 0 without a watchdog."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._address = env.get("NOTIFY_SOCKET", "")
        mine = env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        word = env.get("WATCHDOG_USEC", "")
        self.due_s = int(word) / 2e6 if mine and word.isdigit() else 0.0

    def tell(self, *words: str) -> None:
        """``READY=1``, ``WATCHDOG=1``, ``STATUS=...``, ``STOPPING=1``. A manager that does not listen is no fault of ours."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.connect(address)
            out.send("\n".join(words).encode())
