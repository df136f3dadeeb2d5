#!/usr/bin/env python3
"""A fake container runtime, named so: the few words of docker's and podman's command line that opsctl uses.

``run [--rm] [--name N] IMAGE ARGS...`` runs the program of $FAKE_RUNTIME_PROGRAM (words parted by colons) with ARGS in
the foreground, ``inspect N`` answers in the shape of ``docker inspect``, ``image inspect NAME`` knows the images that
the file ``.images`` of its state folder names (no file: every one). There is no image, no namespace and no isolation behind it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ.get("FAKE_RUNTIME_STATE", "/run/fake-runtime"))


def run(words: list[str]) -> int:
    name = secrets.token_hex(4)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--name":
            name = words.pop(0)
    image, args = words[0], words[1:]
    program = os.environ.get("FAKE_RUNTIME_PROGRAM", "sleep").split(":")
    process = subprocess.Popen([*program, *args])
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    STATE.mkdir(parents=True, exist_ok=True)
    found = {
        "Id": secrets.token_hex(32), "Name": f"/{name}", "RestartCount": 0,
        "State": {"Status": "running", "Running": True, "Pid": process.pid},
        "Config": {"Image": image, "Cmd": args or None},
    }  # fmt: skip
    (STATE / f".{name}").write_text(json.dumps([found]))
    (STATE / f".{name}").rename(STATE / name)
    code = process.wait()
    (STATE / name).unlink(missing_ok=True)
    return 128 - code if code < 0 else code


def main(words: list[str]) -> int:
    if words[0] == "run":
        return run(words[1:])
    if words[:2] == ["image", "inspect"]:
        known = STATE / ".images"
        return 0 if not known.exists() or words[2] in known.read_text().split() else 1
    try:
        print((STATE / words[1]).read_text())
    except FileNotFoundError:
        print(f"Error: no such object: {words[1]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
