"""The API process: ``python -m engine.server.main``, started by the launcher.

Environment: LASTBATCH_SETTINGS (``Settings.to_json``), LASTBATCH_SOCKETS (folder of the ZMQ sockets), INVOCATION_ID,
and, each optional, LASTBATCH_READY_FD (``listening HOST PORT`` is written there), LASTBATCH_MODEL_FOLDER and
LASTBATCH_RUN_DIR (the folders of the model and of the black boxes, where the settings leave them open),
LASTBATCH_KEYS_FD (where the launcher hands over the API keys), else LASTBATCH_API_KEY and LASTBATCH_ADMIN_KEY,
LASTBATCH_CONTROL_FD (where the launcher says that the engine broke; see ``control``).

Exit: 0 after SIGTERM and a drain, 1 when something broke, 2 when a setting cannot be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path

import uvicorn

from engine.config import ConfigError, Settings, run_directory
from engine.server.app import build
from engine.server.auth import Keys
from engine.server.connections import Connection, Gate, most_connections, raise_descriptor_limit
from engine.server.control import reason_to_end
from engine.server.errors import ApiError
from engine.server.identity import Identity
from engine.server.listener import listen
from engine.server.metrics import Meters
from engine.server.sampling_defaults import SamplingDefaults, read_defaults
from engine.server.service import Service
from engine.server.wire import Link
from engine.text.chat_template import TemplateError
from engine.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("engine.server")

TITLE = "lastbatch::api"
_UNWATCHED_SILENCE_S = 600.0
_LAST_WORDS_S = 5.0  # for errors to reach clients after the drain's deadline, or when the engine broke
_BROKEN_RETRY_S = 10
_PR_SET_PDEATHSIG = 1


class Server(uvicorn.Server):
    """uvicorn without its signal handling, for SIGTERM drains first; it says when and where it listens."""

    def __init__(self, config: uvicorn.Config, ready_descriptor: int | None) -> None:
        super().__init__(config)
        self._ready_descriptor = ready_descriptor

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.should_exit or not sockets:
            return
        host, port = sockets[0].getsockname()[:2]
        log.info("listening on %s port %d", host, port)
        if self._ready_descriptor is not None:
            os.write(self._ready_descriptor, f"listening {host} {port}\n".encode())
            os.close(self._ready_descriptor)
            self._ready_descriptor = None


def main(env: Mapping[str, str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while it boots there is nothing to drain
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole group; the launcher sends SIGTERM
    _die_with_parent()
    _name_process()
    try:
        settings = Settings.from_json(env["LASTBATCH_SETTINGS"])
        sockets = Path(env["LASTBATCH_SOCKETS"])
    except KeyError as error:
        print(f"engine.server.main: {error.args[0]} is not set; it is started by `lastbatch serve`", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.server.log_level.upper(), format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
    )
    try:
        folder = _model_folder(settings, env)
        template = Path(settings.model.chat_template) if settings.model.chat_template else None
        tokenizer = Tokenizer.load(folder, template)
        if tokenizer.template_note:
            log.warning("%s: %s", folder.name, tokenizer.template_note)
        sampling = read_defaults(settings, folder)
        if sampling.note:
            log.info("What a request does not set is the model's: %s (--sampling-defaults)", sampling.note)
        keys = Keys.read(settings, env)
        listener = listen(settings.server.host, settings.server.port)
    except (ConfigError, TokenizerError, TemplateError) as error:
        log.error("%s", error)
        return 2
    except OSError as error:
        log.error("--host %s --port %d: cannot listen: %s", settings.server.host, settings.server.port, error)
        return 1
    identity = Identity.of(settings, model_folder=folder, invocation_id=env.get("INVOCATION_ID", ""), now_unix_s=int(time.time()))
    descriptor = int(env["LASTBATCH_READY_FD"]) if env.get("LASTBATCH_READY_FD") else None
    boxes = Path(env["LASTBATCH_RUN_DIR"]) if env.get("LASTBATCH_RUN_DIR") else run_directory(settings, env)
    return asyncio.run(serve(settings, identity, tokenizer, sampling, keys, sockets, boxes, listener, descriptor, env))


async def serve(settings: Settings, identity: Identity, tokenizer: Tokenizer, sampling: SamplingDefaults, keys: Keys, sockets: Path,
                boxes: Path, listener: socket.socket, ready_descriptor: int | None, env: Mapping[str, str]) -> int:  # fmt: skip
    """Serve on ``listener`` until SIGTERM, then drain; or until the launcher says that the engine broke. The exit status."""
    # The launcher's watchdog acts first; this is for a scheduler that nobody watches, or that it judges to be well.
    link = Link(sockets, silence_s=2 * settings.launch.watchdog_timeout_s or _UNWATCHED_SILENCE_S)
    link.armed = settings.launch.fault
    service = Service(settings, identity, tokenizer, link, Meters(), keys, boxes, sampling)
    scheduler = settings.scheduler
    gate = Gate(most_connections(raise_descriptor_limit(), scheduler.max_queued_requests + scheduler.max_running_requests))
    asyncio.get_running_loop().set_exception_handler(gate.loop_failed)
    config = uvicorn.Config(
        build(service), http=functools.partial(Connection, gate=gate), ws="none", lifespan="off",  # type: ignore[arg-type]
        access_log=False, log_config=None, log_level="warning", server_header=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=int(_LAST_WORDS_S),
    )  # fmt: skip
    server = Server(config, ready_descriptor)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    reading = asyncio.create_task(link.run(), name="wire")
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    asking = asyncio.create_task(asked.wait(), name="sigterm")
    broken = reason_to_end(env)
    try:
        await asyncio.wait((reading, serving, asking, broken), return_when=asyncio.FIRST_COMPLETED)
        if asked.is_set() and not broken.done():
            await _unless_broken(broken, _drain(service))
        if broken.done():
            _give_up(service, broken.result())
        elif not asked.is_set():
            failed = reading if reading.done() else serving
            log.error("%s ended by itself", failed.get_name(), exc_info=failed.exception())
            return 1
        server.should_exit = True
        await serving
        return 1 if broken.done() else 0
    finally:
        for task in (reading, serving, asking):
            task.cancel()
        await asyncio.wait((reading, serving, asking))
        link.close()


async def _drain(service: Service) -> None:
    """Refuse what is new, let what runs finish until ``--drain-timeout``, and tell the rest."""
    service.draining = True
    limit = service.settings.server.drain_timeout_s
    log.info("shutting down: %d requests in flight, at most %g s", service.link.in_flight, limit)
    if await service.link.drain(time.monotonic() + limit):
        return
    log.warning("shutting down: %d requests did not finish within %g s", service.link.in_flight, limit)
    service.link.fail_all(ApiError(503, "the server was shut down before the answer was complete", code="draining", retry_after_s=1))


async def _unless_broken(broken: asyncio.Future[str], work: Coroutine[None, None, None]) -> None:
    """Do ``work`` until it is done or ``broken`` is."""
    working = asyncio.create_task(work)
    await asyncio.wait((working, broken), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        working.result()
    else:
        working.cancel()
        await asyncio.wait((working,))


def _give_up(service: Service, why: str) -> None:
    """Nothing more will come from the scheduler: tell everybody who waits. Why is for the log; clients can do nothing with it."""
    service.draining = True
    log.error("cannot go on (%s): %d requests in flight end with an error", why, service.link.in_flight)
    text = "the engine ended before the answer was complete; the server is going down"
    service.link.fail_all(ApiError(503, text, code="engine_ended", retry_after_s=_BROKEN_RETRY_S))


def _model_folder(settings: Settings, env: Mapping[str, str]) -> Path:
    if folder := env.get("LASTBATCH_MODEL_FOLDER") or settings.model.path:
        return Path(folder)
    from engine import default_model  # with numpy, which this process needs for nothing else

    try:
        return default_model.path()
    except default_model.ModelError as error:
        raise ConfigError(str(error)) from error


def _die_with_parent() -> None:
    """Have the kernel end this process with the launcher: nobody would stop it otherwise."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died in between
        sys.exit(1)


def _name_process() -> None:
    os.environ["SPT_NOENV"] = "1"  # keep /proc/PID/environ for whoever looks
    import setproctitle

    setproctitle.setproctitle(TITLE)


if __name__ == "__main__":
    sys.exit(main(os.environ))
