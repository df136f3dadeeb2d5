"""A side of a comparison: a server that runs already, or a command that is started for each repetition and ended after."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from monitors.capture.redact import Policy, redact
from opsctl.load.client import Client, NoServer
from opsctl.load.shapes import PLAIN
from opsctl.service.child import die_with

_WORDS_STAY = Policy(include_prompts=True)
_POLL_S = 0.2
_ANSWER_S = 2.0
_STOP_S = 30.0
_LOADING = 503


@dataclass(frozen=True)
class Place:
    """Where to ask, and how. ``command`` serves at ``url`` until SIGTERM; empty where the server runs already."""

    name: str
    url: str
    model: str = ""
    key: str = ""
    command: str = ""
    boot_s: float = 300.0
    request_s: float = 300.0

    @property
    def told(self) -> str:
        """The command without its secrets, for results and errors."""
        return redact(self.command, "command", _WORDS_STAY)[0]


def problem(command: str) -> str:
    """Why a command line cannot be started; empty when it can be tried."""
    try:
        return "" if not command or shlex.split(command) else "no program"
    except ValueError as error:
        return str(error)


@contextlib.asynccontextmanager
async def opened(place: Place, env: Mapping[str, str], log: Path | None = None) -> AsyncIterator[Client]:
    """A client of a side that answers. What a command started is gone when the block is left. Raises NoServer."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(place.url, model=place.model, key=place.key, deadline_s=place.request_s))
        if place.command:
            await stack.enter_async_context(_started(place, env, log))
        await client.find_model()
        if place.command:
            await _loaded(client, place, log)
        yield client


@contextlib.asynccontextmanager
async def _started(place: Place, env: Mapping[str, str], log: Path | None) -> AsyncIterator[None]:
    if await _answers(place):
        raise NoServer(
            f"{place.url}: something answers there before {shlex.split(place.command)[0]} was started; end it, or take another port"
        )
    with contextlib.ExitStack() as files:
        sink = files.enter_context(log.open("ab")) if log else asyncio.subprocess.DEVNULL
        argv = shlex.split(place.command)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),  # no server stays behind a client that was killed
            )
        except OSError as error:
            raise NoServer(f"{argv[0]}: {error.strerror}") from error
        try:
            await _ready(place, process, log)
            yield
        finally:
            await _end(process)


async def _ready(place: Place, process: asyncio.subprocess.Process, log: Path | None) -> None:
    where = f"; its log is {log}" if log else ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(place.boot_s):
            while process.returncode is None:
                if await _answers(place):
                    return
                await asyncio.sleep(_POLL_S)
        raise NoServer(f"{place.told}: ended with {process.returncode} before it served{where}")
    raise NoServer(f"{place.told}: does not serve at {place.url} after {place.boot_s:g} s{where}")


async def _loaded(client: Client, place: Place, log: Path | None) -> None:
    """Until it generates: a server may name its model while it still loads it, and answers 503 so long."""
    until = client.clock() + place.boot_s
    while (came := await client.learn_tokens(PLAIN, random.Random(0))).status == _LOADING:
        if client.clock() > until:
            where = f"; its log is {log}" if log else ""
            raise NoServer(f"{place.told}: still answers {came.status} after {place.boot_s:g} s ({came.note}){where}")
        await asyncio.sleep(_POLL_S)


async def _answers(place: Place) -> bool:
    headers = {"Authorization": f"Bearer {place.key}"} if place.key else {}
    async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
        try:
            async with asyncio.timeout(_ANSWER_S), http.stream("GET", f"{place.url.rstrip('/')}/v1/models", headers=headers) as answer:
                return answer.status_code == 200
        except (httpx.HTTPError, TimeoutError):
            return False


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to the server, then SIGKILL to all that it left of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
