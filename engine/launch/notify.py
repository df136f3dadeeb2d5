"""systemd's notification protocol (sd_notify(3)): one datagram to $NOTIFY_SOCKET."""

from __future__ import annotations

import socket
from collections.abc import Mapping


class Notifier:
    """Talks to the service manager that started this process, or to nobody if none did.

    ``watchdog_s`` is how often the manager wants WATCHDOG=1 at the latest; None when it does not.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._address = env.get("NOTIFY_SOCKET", "")
        usec = env.get("WATCHDOG_USEC", "")
        self.watchdog_s: float | None = int(usec) / 1e6 if usec.isdigit() and int(usec) > 0 else None

    def send(self, *lines: str) -> bool:
        """False when there is no manager or it cannot be reached; serving goes on either way."""
        if not self._address:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
                link.settimeout(1.0)
                link.connect(address)
                link.sendall("\n".join(lines).encode())
        except OSError:
            return False
        return True
