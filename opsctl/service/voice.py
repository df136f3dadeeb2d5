"""The voice of a command that may wait for machines that do not answer: whoever watches it hears something at least every
few seconds, also while one question to one node is still out (an ssh that finds nobody takes its whole time limit)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SILENCE_S = 9.0


class Voice:
    """``talk`` with a memory; call it from any thread."""

    def __init__(self, talk: Callable[[str], None], silence_s: float = SILENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._talk, self._silence_s, self._clock = talk, silence_s, clock
        self._lock = threading.Lock()
        self._last, self._began, self._said_at = "", clock(), clock()
        self._asking = False

    def __call__(self, text: str) -> None:
        with self._lock:
            self._last, self._began = text, self._clock()
            self._said_at = self._began
            self._talk(text)

    def remind(self) -> None:
        """Say that it is still there, when nothing was said for so long."""
        with self._lock:
            now = self._clock()
            if not self._asking and now - self._said_at >= self._silence_s:
                self._said_at = now
                about = f": {self._last.splitlines()[-1][:160]}" if self._last else ", nothing has come back yet"
                self._talk(f"still at it after {now - self._began:.0f} s{about}")

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While a person is asked: then it is the command that is waited for."""
        self._asking = True
        try:
            yield
        finally:
            with self._lock:
                self._asking, self._began = False, self._clock()
                self._said_at = self._began

    @contextlib.contextmanager
    def kept_up(self) -> Iterator[Voice]:
        """Reminds from a thread of its own until it is left."""
        done = threading.Event()

        def run() -> None:
            while not done.wait(self._silence_s / 9):
                self.remind()

        thread = threading.Thread(target=run, name="voice", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            done.set()
            thread.join()
