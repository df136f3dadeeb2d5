"""No node waits for another: each has a lane in which its probes run one after another, and one that stops answering
costs its own lane one wait, not one wait for each probe that is left."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Sequence

from monitors.capture.manifest import utc
from monitors.remote import Done, NodeError, Remote

_PING_S = 2.0
_GRACE_S = 2.0  # so long the others are waited for when one node is done: most probes end together, and give one file


class Lanes:
    """A lane a node. ``each`` returns when all nodes are done, or a moment after the first is; what is not done goes on,
    and the next probe of that node comes after it. ``drain`` waits for the rest."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self._lanes = {name: concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"lane-{name}") for name in nodes}
        self._late: list[tuple[str, str, concurrent.futures.Future[None]]] = []

    def each(self, probe: str, work: Callable[[str], None]) -> None:
        """Raises what ``work`` raised on a node that is done."""
        behind = {name for name, _, job in self._late if not job.done()}
        jobs = {name: lane.submit(work, name) for name, lane in self._lanes.items()}
        # A node that is behind already is waited for by nobody.
        ahead = [job for name, job in jobs.items() if name not in behind] or list(jobs.values())
        concurrent.futures.wait(ahead, return_when=concurrent.futures.FIRST_COMPLETED)
        concurrent.futures.wait(ahead, timeout=_GRACE_S)
        self._late += [(name, probe, job) for name, job in jobs.items() if not job.done()]
        for job in jobs.values():
            if job.done():
                job.result()

    def drain(self, deadline_s: float) -> list[tuple[str, str, str]]:
        """(node, probe, why) of what has failed late or has not been come to within the deadline."""
        until = time.monotonic() + deadline_s
        found = []
        for name, probe, job in self._late:
            try:
                job.result(max(0.0, until - time.monotonic()))
            except concurrent.futures.TimeoutError:
                # What runs has a deadline of its own, a little later than this one.
                found.append(
                    (name, probe, "not done when the capture's time was up" if not job.cancel() else "its turn did not come in time")
                )
            except Exception as error:
                found.append((name, probe, f"the probe itself failed: {type(error).__name__}: {error}"))
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)
        return found


class Patient(Remote):
    """An open connection that is asked no more once its node was lost in the middle of a capture."""

    def __init__(self, remote: Remote) -> None:
        self.__dict__.update(remote.__dict__)
        self._own_dir = False  # the connection is the other's to close
        self._lost = ""

    def run(self, command: Sequence[str], *, deadline_s: float, stdin: bytes = b"") -> Done:
        if self._lost:
            raise NodeError("unreachable", self._lost)
        try:
            return super().run(command, deadline_s=deadline_s, stdin=stdin)
        except NodeError as error:
            if not self.local and (error.kind == "unreachable" or (error.kind == "deadline" and not self._answers())):
                self._lost = f"node {self.name}: not reached since {utc()} ({error}); it was not asked again"
            raise

    def _answers(self) -> bool:
        """Whether it was the command that took too long and not the node."""
        try:
            return super().run(["true"], deadline_s=_PING_S).code == 0
        except NodeError:
            return False
