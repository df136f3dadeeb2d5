"""``python -m opsctl.service.launch``: run a supervisor, in the foreground or left behind in a session of its own."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from opsctl.service.manager import ServiceError
from opsctl.service.supervisor import Supervisor

_LISTENING = b"listening\n"


def main(argv: list[str] | None = None) -> int:
    """``--detach``: return once the supervisor listens, leaving it behind in a session of its own."""
    parser = argparse.ArgumentParser(prog="opsctl.service.launch", description="keep one service running")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--start", action="store_true")
    args = parser.parse_args(argv)
    folder: Path = args.folder.absolute()
    told, tell = os.pipe()
    if args.detach and os.fork():
        os.close(tell)
        with os.fdopen(told, "rb") as pipe:
            said = pipe.read()
        if said == _LISTENING:
            return 0
        sys.stderr.buffer.write(said or b"the supervisor died before it listened\n")
        return 1
    os.close(told)
    os.chdir("/")
    if args.detach:
        os.setsid()
    try:
        supervisor = Supervisor(folder, args.name, dict(os.environ))
    except (ServiceError, OSError) as error:
        os.write(tell if args.detach else 2, f"{error}\n".encode())
        return 1

    def ready() -> None:
        if args.detach:
            os.write(tell, _LISTENING)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            os.close(nothing)
        os.close(tell)

    return supervisor.run(start=args.start, ready=ready)


if __name__ == "__main__":
    sys.exit(main())
