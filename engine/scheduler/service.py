"""Rank 0's ends of the wire: requests in, answers out, faults, drain; and the turn of the loop between them."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import zmq

from engine.blackbox import BlackBox, Phase
from engine.exec.executor import Executor
from engine.exec.step import Step
from engine.faults import FaultError, Faults
from engine.messages import (
    Abort,
    ClearFault,
    Drain,
    Drained,
    FaultAnswer,
    FromScheduler,
    Generate,
    Outputs,
    Ready,
    Refused,
    SetFault,
    Tokens,
    encode,
    to_scheduler,
)
from engine.scheduler import warmup
from engine.scheduler.loops import Loop, OverlapLoop, SequentialLoop
from engine.scheduler.place import Place
from engine.scheduler.plan import Arm, Disarm, Open, Plan
from engine.scheduler.rank_link import RankHub
from engine.scheduler.results import Launched, Results
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.worker import reset_counters

if TYPE_CHECKING:
    from engine.grammar.backends import GrammarBackend

_IDLE_S = 0.2
_COMPILING_S = 0.005
_log = logging.getLogger("engine.rank")


class GroupRunner:
    """Carries a plan out on every rank: the others get it by message, this one by call."""

    def __init__(self, hub: RankHub, executor: Executor) -> None:
        self._hub = hub
        self._executor = executor

    def launch(self, plan: Plan) -> Step:
        self._hub.send(plan)
        return self._executor.launch(plan)

    def collect(self, launched: Launched) -> Results:
        assert isinstance(launched, Step)
        return self._executor.collect(launched)


class Service:
    """Rank 0's ends of the wire, around the scheduler and its loop."""

    def __init__(self, place: Place, context: zmq.Context[zmq.Socket[bytes]], box: BlackBox, runner: GroupRunner, hub: RankHub,
                 grammar: GrammarBackend | None, faults: Faults | None, *, pages: int, context_length: int) -> None:  # fmt: skip
        settings = place.settings
        self._place, self._box, self._hub, self._faults = place, box, hub, faults
        self._inbox = context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(f"ipc://{place.sockets}/to-scheduler.sock")
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.setsockopt(zmq.LINGER, 1000)
        self._outbox.connect(f"ipc://{place.sockets}/from-scheduler.sock")
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(place.control, zmq.POLLIN)
        self._send_outputs: Callable[[Outputs], None] = self._answer
        self._vocabulary = 0
        self._draining = False
        self._warming = False
        self._scheduler = Scheduler(settings, runner, box, pages=pages, context=context_length, grammar=grammar,
                                    send=lambda outputs: self._send_outputs(outputs),
                                    log=logging.getLogger("engine.scheduler").info, faults=faults)  # fmt: skip
        kind = OverlapLoop if settings.overlaps(place.device_kind) else SequentialLoop
        self.loop_name = kind.name
        self._loop: Loop = kind(self._scheduler, self._receive)

    def warm_up(self, prompt: list[int]) -> None:
        settings = self._place.settings
        most = self._scheduler.longest_prompt
        warm = warmup.Warmup(self._scheduler.add, self._turn, deadline_s=settings.launch.boot_timeout_s)
        self._send_outputs = warm.take
        self._warming = True
        for request in warmup.requests(settings, prompt, most):
            begun = time.monotonic()
            warm.run(request)
            _log.info("Warm-up %s done in %.2f s", request.rid.removeprefix("warmup-"), time.monotonic() - begun)
        self._scheduler.forget_prefixes()
        self._warming = False
        self._send_outputs = self._answer

    def open(self, ready: Ready, said: Mapping[str, object]) -> None:
        """Let requests in. ``said``: what the launcher puts into the line that says so."""
        if self._faults is not None and "boot.hang" in self._faults:
            self._box.enter(Phase.load)
            threading.Event().wait()
        self._hub.send(Open())
        reset_counters(self._box)
        self._vocabulary = ready.vocab_size
        if self._faults is not None:
            self._faults.ready = True
        self._post(ready)
        os.write(self._place.ready, (json.dumps(said) + "\n").encode())
        _log.info("The server is fired up and ready to roll!")

    def serve(self) -> None:
        """Serve until the launcher says stop."""
        while not self._place.stopped() and not (self._faults is not None and self._faults.dismissed()):
            self._turn()
        self._scheduler.abort_all("the server is stopping")
        self._scheduler.flush()

    def _turn(self) -> bool:
        busy = self._loop.turn()
        self._scheduler.publish_state()
        if not busy:
            self._rest()
        return busy

    def _rest(self) -> None:
        scheduler = self._scheduler
        scheduler.flush()
        if self._draining and not scheduler.queues.held:
            self._draining = False
            self._post(Drained())
        if not scheduler.queues.held:
            scheduler.idle()
        self._box.enter(Phase.idle)
        self._poller.poll(int(1000 * (_COMPILING_S if scheduler.queues.compiling or self._warming else _IDLE_S)))

    def _receive(self) -> None:
        self._box.enter(Phase.recv)
        while True:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(to_scheduler.decode(frame))
        self._scheduler.poll_grammars()
        # What has come in is held from now on: a plan that never returns must not look like an idle server.
        self._box.beat(held=self._scheduler.queues.held)
        self._box.enter(Phase.schedule)

    def _take(self, message: Generate | Abort | SetFault | ClearFault | Drain) -> None:
        if isinstance(message, Generate):
            if self._draining:
                self._post(Outputs([Refused(message.rid, 503, "the server is stopping", "service_unavailable", 5)]))
            else:
                self._scheduler.add(message)
        elif isinstance(message, Abort):
            self._scheduler.abort(message)
        elif isinstance(message, Drain):
            self._draining = True
        else:
            self._set_fault(message)

    def _set_fault(self, message: SetFault | ClearFault) -> None:
        if self._faults is None:
            self._post(FaultAnswer(message.call, False, "this server was started without --enable-faults", []))
            return
        try:
            if isinstance(message, SetFault):
                self._faults.arm(message.spec)
                self._hub.send(Arm(message.spec))
            else:
                self._faults.disarm(message.name)
                self._hub.send(Disarm(message.name))
        except FaultError as error:
            self._post(FaultAnswer(message.call, False, str(error), self._faults.armed))
            return
        self._post(FaultAnswer(message.call, True, "", self._faults.armed))

    def _answer(self, outputs: Outputs) -> None:
        if self._faults is not None:
            for item in outputs.items:
                if isinstance(item, Tokens):
                    item.ids = self._faults.told(item.rid, item.ids, self._vocabulary, last=bool(item.finish))
        self._post(outputs)

    def _post(self, message: FromScheduler) -> None:
        self._outbox.send(encode(message))
