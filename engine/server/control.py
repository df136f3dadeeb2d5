"""The pipe from the launcher: one line on it says that the engine broke, and why.

SIGTERM asks for a drain, which needs an engine that works. After such a line nothing more comes from the scheduler, and
whoever waits for an answer must be told so before this process is killed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

_LONGEST = 4096


def reason_to_end(env: Mapping[str, str]) -> asyncio.Future[str]:
    """Done with the line when it comes; never, where no launcher handed over a pipe."""
    loop = asyncio.get_running_loop()
    said: asyncio.Future[str] = loop.create_future()
    if env.get("LASTBATCH_CONTROL_FD"):
        descriptor = int(env["LASTBATCH_CONTROL_FD"])
        loop.add_reader(descriptor, _read, loop, descriptor, said)
    return said


def _read(loop: asyncio.AbstractEventLoop, descriptor: int, said: asyncio.Future[str]) -> None:
    """A line is shorter than what a pipe takes in one piece. The launcher's own end closes it without one."""
    loop.remove_reader(descriptor)
    line = os.read(descriptor, _LONGEST).decode(errors="replace").strip()
    if line and not said.done():
        said.set_result(line)
