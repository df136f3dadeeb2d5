"""What the steps of a day are played on: the pair of nodes, its clients, its monitor, and what was measured beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from monitors.exit_codes import ExitCode
from opsctl.replay.document import Caller, Day
from opsctl.replay.pair import DEPLOYMENT, Pair
from opsctl.staging.callers import table
from opsctl.staging.clients import CONSTRAINED, AgentLoop, ask
from opsctl.staging.gateway import Gateway
from opsctl.staging.waiting import StageError, wait_for
from opsctl.staging.watcher import Watcher

PLAIN = {"messages": [{"role": "user", "content": "Say in one sentence what a log is."}], "max_tokens": 12, "temperature": 0}
_ANSWER_S = 20.0
_VERIFY_S = 240.0
_TRIES = 3
Left = Callable[[], float]  # seconds that a step may still take


@dataclass
class Stage:
    """``restarts``: seconds from each order to restart that was given here to the first real completion. ``wedged``: when
    rank 0 last made progress, on the monotonic clock; None while the server is believed to serve."""

    pair: Pair
    day: Day
    gateway: Gateway
    talk: Callable[[str], None]
    restarts: list[float] = field(default_factory=list)
    wedged: float | None = None
    serving: bool = False
    loop: AgentLoop | None = None
    watcher: Watcher | None = None

    def boot(self, deadline_s: float) -> None:
        """The first start, proven and recorded as what a revert goes back to. Raises StageError."""
        until = time.monotonic() + deadline_s
        self.pair.begin()
        self.pair.wait_active(deadline_s)
        self.talk("both units are active; the baseline is verified by real completions")
        verified = self.pair.opsctl("rollout", "verify", deadline_s=min(_VERIFY_S, max(1.0, until - time.monotonic())))
        if verified["exit_code"] != ExitCode.DONE:
            raise StageError(f"the baseline is not green: {verified['errors'] or verified['data']}")
        self.serving = True

    def serve(self, left: Left) -> None:
        """A server that answers: the one that runs, or, when it does not answer, a new start. Raises StageError."""
        if self.serving and ask(self.pair.url, PLAIN, timeout_s=min(_ANSWER_S, left())).status == 200:
            return
        self.talk("restarting: opsctl service restart-group")
        begun = time.monotonic()
        for tries in range(_TRIES, 0, -1):  # a node that is too busy for ssh is asked again
            answer = self.pair.opsctl("service", "restart-group", deadline_s=left())
            if answer["exit_code"] == ExitCode.DONE:
                break
            if tries == 1:
                raise StageError(f"the group did not start again: {answer['errors']}")
            self.talk(f"the group did not start again, once more: {answer['errors'][0]['message']}")
        wait_for(lambda: ask(self.pair.url, PLAIN, timeout_s=_ANSWER_S).status == 200, max(1.0, left()), "a real completion", poll_s=0.2)
        self.restarts.append(time.monotonic() - begun)
        self.talk(f"first real completion {self.restarts[-1]:.1f} s after the order to restart")
        self.serving, self.wedged = True, None

    def watch(self) -> Watcher:
        """The hang monitor, over ssh, from the operator's side."""
        if self.watcher is None:
            self.watcher = self.pair.monitor(self.day.stall_s)
        return self.watcher

    def begin_loop(self) -> AgentLoop:
        self.loop = AgentLoop(self.pair.url)
        self.loop.start()
        return self.loop

    def send_constrained(self) -> float:
        """One request that wants JSON, beside whatever runs; the monotonic second at which it was sent."""
        threading.Thread(target=lambda: ask(self.pair.url, CONSTRAINED, timeout_s=180), daemon=True).start()
        return time.monotonic()

    def release(self) -> None:
        """The loop and the monitor of a step are ended; a turn that a wedge holds ends with the server."""
        loop, self.loop = self.loop, None
        if loop is not None:
            loop.stop(wait_s=0.0 if self.wedged is not None else 30.0)
        watcher, self.watcher = self.watcher, None
        if watcher is not None:
            watcher.close()


def callers_toml(callers: Sequence[Caller], gateway: str) -> str:
    """The clients as the fleet file names them."""
    return "".join(
        table(DEPLOYMENT, one.name, one.request, one.expect, never_live=one.never_live, via=gateway if one.gateway else "")
        for one in callers
    )
