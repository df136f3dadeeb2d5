"""Compiling off the scheduler's thread, under a deadline.

A compilation cannot be stopped from outside; what might never end is tried in a process first (``trial.py``). One that
overruns here all the same is reported as failed and its thread is left behind; when too many were left behind, further
grammars are refused until one of them ends, so that a client cannot take every core by sending bombs.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.messages import Grammar

T = TypeVar("T")
Clock = Callable[[], float]
_TOO_MANY = "no grammar can be compiled now: earlier ones overran their time and still run"


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """``late``: it had been reported as failed when its thread came to an end after all. ``busy``: it was not even
    begun, and may do later."""

    key: str
    compiled: T | None
    error: str = ""
    late: bool = False
    busy: bool = False


@dataclass
class _Job:
    key: str
    grammar: Grammar
    thread: threading.Thread | None = None
    deadline: float = 0.0


class CompilePool(Generic[T]):
    """Runs ``compile(grammar)`` in threads of its own, ``workers`` at a time. All methods are for one thread.

    Args:
        compile: raises ValueError with a text for the client.
        timeout_s: for one compilation, from when it begins.
        patience_s: after which its thread is given up; ``timeout_s``, unless ``compile`` itself keeps that time.
        max_abandoned: threads left behind at which nothing more is taken.
        max_waiting: compilations that may wait for a thread.
    """

    def __init__(self, compile: Callable[[Grammar], T], *, timeout_s: float, clock: Clock, patience_s: float | None = None,
                 workers: int = 2, max_abandoned: int = 2, max_waiting: int = 256) -> None:  # fmt: skip
        self._compile = compile
        self._timeout_s = timeout_s
        self._patience_s = timeout_s if patience_s is None else patience_s
        self._clock = clock
        self._workers = workers
        self._max_abandoned = max_abandoned
        self._max_waiting = max_waiting
        self._waiting: deque[_Job] = deque()
        self._running: dict[str, _Job] = {}
        self._abandoned: dict[str, _Job] = {}
        self._refused: list[Outcome[T]] = []
        self._done: queue.SimpleQueue[tuple[_Job, T | None, str]] = queue.SimpleQueue()

    def submit(self, key: str, grammar: Grammar) -> None:
        """Take a compilation; ``poll`` tells how it ended. One that is on its way already is not begun again."""
        if key in self._running or any(job.key == key for job in self._waiting):
            return
        if key in self._abandoned:
            self._refused.append(Outcome(key, None, self._overrun()))
        elif len(self._abandoned) >= self._max_abandoned:
            self._refused.append(Outcome(key, None, _TOO_MANY, busy=True))
        elif len(self._waiting) >= self._max_waiting:
            self._refused.append(Outcome(key, None, f"no grammar can be compiled now: {len(self._waiting)} others wait", busy=True))
        else:
            self._waiting.append(_Job(key, grammar))
            self._start()

    def poll(self) -> list[Outcome[T]]:
        """What ended since the last call, overruns included. Never blocks."""
        outcomes, self._refused = self._refused, []
        outcomes += self._ended()
        now = self._clock()
        for job in [job for job in self._running.values() if now > job.deadline]:
            self._abandoned[job.key] = self._running.pop(job.key)
            outcomes.append(Outcome(job.key, None, self._overrun()))
        if len(self._abandoned) >= self._max_abandoned:
            for job in self._waiting:
                outcomes.append(Outcome(job.key, None, _TOO_MANY, busy=True))
            self._waiting.clear()
        self._start()
        return outcomes

    def close(self, timeout_s: float) -> bool:
        """Take nothing more and wait for the threads; false when some still run (they end with the process)."""
        self._waiting.clear()
        deadline = self._clock() + timeout_s
        for job in (*self._running.values(), *self._abandoned.values()):
            if job.thread is not None:
                job.thread.join(max(0.0, deadline - self._clock()))
        return not any(job.thread and job.thread.is_alive() for job in (*self._running.values(), *self._abandoned.values()))

    def _ended(self) -> list[Outcome[T]]:
        outcomes: list[Outcome[T]] = []
        while True:
            try:
                job, compiled, error = self._done.get_nowait()
            except queue.Empty:
                return outcomes
            late = self._running.pop(job.key, None) is None
            if late:
                self._abandoned.pop(job.key, None)
            outcomes.append(Outcome(job.key, compiled, error, late))

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._workers:
            job = self._waiting.popleft()
            job.deadline = self._clock() + self._patience_s
            job.thread = threading.Thread(target=self._run, args=(job,), name="grammar-compile", daemon=True)
            self._running[job.key] = job
            job.thread.start()

    def _run(self, job: _Job) -> None:
        try:
            compiled = self._compile(job.grammar)
        except ValueError as error:
            self._done.put((job, None, str(error) or type(error).__name__))
        except Exception as error:  # a compiler that fails in another way must not leave its request waiting for ever
            self._done.put((job, None, f"the grammar compiler failed: {type(error).__name__}: {error}"))
        else:
            self._done.put((job, compiled, ""))

    def _overrun(self) -> str:
        return f"the grammar takes more than {self._timeout_s:g} s to compile (--grammar-compile-timeout)"
