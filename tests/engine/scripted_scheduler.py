"""A scheduler that says what a test wrote: the real ZMQ wire, no model. It stands in for rank 0 and nothing else.

It runs in a thread of the test. What it answers to a ``Generate`` is a script: an iterable of ``Tokens`` and
``Refused``, sent one a turn, with ``None`` for a turn in which nothing comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

import zmq

from engine.messages import (
    Abort,
    ClearFault,
    Drain,
    Drained,
    FaultAnswer,
    FromScheduler,
    Generate,
    Outputs,
    RankInfo,
    Ready,
    Refused,
    SetFault,
    TokenLogprob,
    Tokens,
    encode,
    to_scheduler,
)
from engine.text.tokenizer import Tokenizer

Step = Tokens | Refused | None
Script = Callable[[Generate], Iterable[Step]]
EOS = 2


def ready(context: int = 1024, vocab: int = 512, pool: int = 4096) -> Ready:
    rank = RankInfo(rank=0, dp=0, pp=0, tp=0, ep=0, node=0, pid=1, config_digest="d" * 32)
    return Ready(context_length=context, vocab_size=vocab, eos_ids=[EOS], pool_tokens=pool, ranks=[rank], paths={"loop": "scripted"})


class ScriptedScheduler:
    """``with ScriptedScheduler(sockets, tokenizer) as scheduler``. ``script`` may be replaced at any time."""

    def __init__(self, sockets: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.script: Script = self.says("Hello there.")
        self.requests: list[Generate] = []
        self.aborted: list[str] = []
        self.armed: list[str] = []
        self.drained = False
        self.deaf = False  # reads and answers nothing, as a wedged rank 0
        self._running: dict[str, Iterator[Step]] = {}
        self._outbox: list[FromScheduler] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(sockets,), name="scripted-scheduler")

    def __enter__(self) -> ScriptedScheduler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(5)

    # Scripts.

    def says(self, text: str, *, finish: str = "stop", each: int = 1) -> Script:
        """The tokens of ``text``, ``each`` a message; cut at max_tokens, with EOS behind when it ends with ``stop``."""

        def script(request: Generate) -> Iterator[Step]:
            ids = self.tokenizer.encode(text)[: request.sampling.max_tokens]
            cut = len(ids) == request.sampling.max_tokens
            if not cut and finish == "stop":
                ids.append(EOS)
            for at in range(0, len(ids), each):
                part = ids[at : at + each]
                last = at + each >= len(ids)
                end = ("length" if cut else finish) if last else ""
                yield self.tokens(request, part, finish=end)

        return script

    def tokens(self, request: Generate, ids: list[int], finish: str = "") -> Tokens:
        """A message with log-probabilities if they were asked for: -0.5 for each token, the next two ids behind it."""
        matched = ids[-1] if finish == "stop" and ids and ids[-1] == EOS else None
        return Tokens(
            rid=request.rid, ids=ids, finish=finish, matched=matched, cached_tokens=1,  # type: ignore[arg-type]
            logprobs=[_logprob(token, request.logprobs) for token in ids] if request.logprobs >= 0 else [],
            prompt_logprobs=(
                [_logprob(token, request.prompt_logprobs) for token in request.input_ids[1:]] if request.prompt_logprobs >= 0 else None
            ),
        )  # fmt: skip

    def hangs_after(self, text: str) -> Script:
        """The tokens of ``text``, and then nothing more, ever."""

        def script(request: Generate) -> Iterator[Step]:
            for token in self.tokenizer.encode(text):
                yield self.tokens(request, [token])
            while True:
                yield None

        return script

    def refuses(self, status: int, message: str) -> Script:
        return lambda request: [Refused(request.rid, status, message)]

    def send(self, message: FromScheduler) -> None:
        self._outbox.append(message)

    def wait_for(self, condition: Callable[[], bool], what: str, deadline_s: float = 15.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
            time.sleep(0.005)

    # The wire.

    def _run(self, sockets: Path) -> None:
        context = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (pull, push):
            socket.setsockopt(zmq.LINGER, 0)
        pull.bind(f"ipc://{sockets / 'to-scheduler.sock'}")
        push.connect(f"ipc://{sockets / 'from-scheduler.sock'}")
        try:
            while not self._stop.is_set():
                if self.deaf:
                    self._stop.wait(0.01)
                    continue
                if pull.poll(2):
                    self._take(to_scheduler.decode(pull.recv()))
                    continue
                self._turn()
                while self._outbox:
                    push.send(encode(self._outbox.pop(0)))
        finally:
            pull.close()
            push.close()
            context.term()

    def _take(self, message: object) -> None:
        match message:
            case Generate():
                self.requests.append(message)
                self._running[message.rid] = iter(self.script(message))
            case Abort(rid):
                self.aborted.append(rid)
                self._running.pop(rid, None)
            case SetFault(call, spec):
                ok = not spec.startswith("unknown")
                self.armed += [spec] if ok else []
                self.send(FaultAnswer(call, ok, "armed" if ok else f"no such fault: {spec}", list(self.armed)))
            case ClearFault(call, name):
                self.armed = [spec for spec in self.armed if name and spec.partition(":")[0] != name]
                self.send(FaultAnswer(call, True, "disarmed", list(self.armed)))
            case Drain():
                self.drained = True

    def _turn(self) -> None:
        items: list[Tokens | Refused] = []
        for rid, steps in list(self._running.items()):
            step = next(steps, None)
            if step is None:
                continue
            items.append(step)
            if isinstance(step, Refused) or step.finish:
                del self._running[rid]
        if items:
            self.send(Outputs(items))
        if self.drained and not self._running:
            self.send(Drained())
            self.drained = False


def _logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, [(token, -0.5), (token + 1, float("-inf"))][:top])
