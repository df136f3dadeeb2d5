"""Who asks: kept with every rollout."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping


def who(env: Mapping[str, str]) -> dict[str, str]:
    """``user`` is the account; ``sudo_user`` and ``from`` (an ssh client's address) say who is behind it, as far as the
    environment tells. It is a record for honest people: whoever may run opsctl may also write its journal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return {"user": user, "host": socket.gethostname(), "sudo_user": env.get("SUDO_USER", ""),
            "from": env.get("SSH_CONNECTION", "").partition(" ")[0]}  # fmt: skip
