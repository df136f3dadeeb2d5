"""A service that a test can read: says who it is, is ready, and then does what its flags say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time


def notify(text: str) -> None:
    address = os.environ["NOTIFY_SOCKET"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)


print(
    "start " + json.dumps({"invocation": os.environ["INVOCATION_ID"], "argv": sys.argv[1:], "mark": os.environ.get("MARK", "")}), flush=True
)
if "--child" in sys.argv:
    subprocess.Popen(["sleep", "4242"], start_new_session=True)
if "--unready" in sys.argv:
    time.sleep(3600)
notify("READY=1")
if "--raise" in sys.argv:
    raise ValueError("of this very start")
if "--silent-exit" in sys.argv:
    time.sleep(1.5)  # a unit that is gone before anybody looked is unloaded, and its start with it
    sys.exit(0)
time.sleep(3600)
