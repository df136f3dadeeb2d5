"""The link to rank 0: two ZMQ sockets, and who waits for which answer.

Sending never waits: the queue has no bound of its own, because admission bounds what can be in flight, and an abort
must go out from a ``finally`` even while the scheduler is frozen. What ends a wait: an answer, the client's leave, or
the scheduler's silence towards everybody for ``silence_s``, after which whoever waits gets 504.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engine.messages import (
    Abort,
    ClearFault,
    Drain,
    Drained,
    FaultAnswer,
    Generate,
    Outputs,
    Ready,
    Refused,
    SetFault,
    Tokens,
    ToScheduler,
    encode,
    from_scheduler,
)
from engine.server.errors import ApiError

log = logging.getLogger(__name__)

Answer = Tokens | Refused | ApiError
_REMEMBERED = 4096
_DRAINED_WAIT_S = 5.0
_RATE_WINDOW_S = 10.0


class Link:
    """One for the API process; used from its event loop only. ``run`` must be running for anything to arrive."""

    def __init__(self, sockets: Path, *, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ready: Ready | None = None
        self.armed: tuple[str, ...] = ()
        self._silence_s = silence_s
        self._clock = clock
        self._waiting: dict[str, asyncio.Queue[Answer]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._calls: dict[str, asyncio.Future[FaultAnswer]] = {}
        self._drained = asyncio.Event()
        self._heard = clock()
        self._rate: deque[tuple[float, int]] = deque()
        self._context = zmq.Context()
        self._push: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._pull = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.setsockopt(zmq.LINGER, 0)
        self._push.setsockopt(zmq.SNDHWM, 0)
        self._pull.setsockopt(zmq.RCVHWM, 0)
        self._pull.bind(f"ipc://{sockets / 'from-scheduler.sock'}")
        self._push.connect(f"ipc://{sockets / 'to-scheduler.sock'}")

    def close(self) -> None:
        self._pull.close()
        self._push.close()
        self._context.term()

    # Requests.

    @property
    def in_flight(self) -> int:
        """Generations that were sent and wait for more, health probes among them."""
        return len(self._waiting)

    def unique(self, rid: str) -> str:
        """``rid``, or ``rid~2`` and so on while it is in use or was given up lately: an old request's late tokens
        must not reach a retry that brings the same id."""
        wire, count = rid, 1
        while wire in self._waiting or wire in self._gone:
            count += 1
            wire = f"{rid}~{count}"
        return wire

    def submit(self, request: Generate, answers: asyncio.Queue[Answer]) -> None:
        """Send, and let everything that comes for ``request.rid`` go to ``answers``."""
        assert request.rid not in self._waiting, f"{request.rid} is in flight"
        if not self._waiting:
            self._heard = self._clock()  # silence counts from the first thing there was to say
        self._waiting[request.rid] = answers
        self._send(request)

    def abort(self, rid: str) -> None:
        """Give up a request; nothing more comes for it. Unknown and finished ids are ignored."""
        if self._waiting.pop(rid, None) is None:
            return
        self._gone[rid] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        self._send(Abort(rid))

    def fail_all(self, error: ApiError) -> None:
        """Give everybody who waits ``error`` as the answer."""
        for rid, answers in list(self._waiting.items()):
            self.abort(rid)
            answers.put_nowait(error)

    # Administration.

    async def set_fault(self, spec: str, *, timeout_s: float) -> FaultAnswer:
        return await self._call(lambda call: SetFault(call, spec), timeout_s)

    async def clear_fault(self, name: str, *, timeout_s: float) -> FaultAnswer:
        return await self._call(lambda call: ClearFault(call, name), timeout_s)

    async def _call(self, make: Callable[[str], ToScheduler], timeout_s: float) -> FaultAnswer:
        """Raises TimeoutError: no answer. The call may still be carried out when the scheduler reads it."""
        call = uuid.uuid4().hex
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(make(call))
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            del self._calls[call]

    async def drain(self, deadline: float) -> bool:
        """Ask the scheduler to finish, and wait until nothing is in flight and it has said so.

        ``deadline`` is on this link's clock. False: it came first, with requests in flight.
        """
        if self.ready is not None:
            self._send(Drain())
        while self._waiting:
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(0.02)
        if self.ready is not None:
            left = min(deadline - self._clock(), _DRAINED_WAIT_S)
            try:
                await asyncio.wait_for(self._drained.wait(), max(left, 0))
            except TimeoutError:
                log.warning("the scheduler did not say that it has drained; nothing is in flight here")
        return True

    def tokens_per_s(self) -> float:
        """Generated tokens that arrived, averaged over the last 10 s: it falls to zero when nothing comes."""
        self._forget_old()
        return sum(count for _, count in self._rate) / _RATE_WINDOW_S

    # The wire.

    def _send(self, message: ToScheduler) -> None:
        self._push.send(encode(message), zmq.NOBLOCK)

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            if await self._pull.poll(1000):
                frame: Any = await self._pull.recv()
                self._heard = self._clock()
                self._take(frame)
            elif self._waiting and self._clock() - self._heard > self._silence_s:
                log.error("the scheduler has said nothing for %.0f s; %d requests are given up", self._silence_s, len(self._waiting))
                text = f"the scheduler has said nothing for {self._silence_s:.0f} s"
                self.fail_all(ApiError(504, text, code="scheduler_silent"))

    def _take(self, frame: bytes) -> None:
        try:
            message = from_scheduler.decode(frame)
        except msgspec.DecodeError as error:
            log.error("a frame of %d bytes from the scheduler cannot be read: %s", len(frame), error)
            return
        match message:
            case Outputs(items):
                for item in items:
                    self._deliver(item)
            case Ready():
                self.ready = message
            case FaultAnswer():
                self.armed = tuple(message.armed)
                if (future := self._calls.get(message.call)) is not None and not future.done():
                    future.set_result(message)
            case Drained():
                self._drained.set()

    def _deliver(self, item: Tokens | Refused) -> None:
        if isinstance(item, Tokens) and item.ids:
            self._forget_old()
            self._rate.append((self._clock(), len(item.ids)))
        answers = self._waiting.get(item.rid)
        if isinstance(item, Refused) or item.finish:
            self._waiting.pop(item.rid, None)
            self._gone.pop(item.rid, None)
        if answers is not None:
            answers.put_nowait(item)

    def _forget_old(self) -> None:
        oldest = self._clock() - _RATE_WINDOW_S
        while self._rate and self._rate[0][0] < oldest:
            self._rate.popleft()
