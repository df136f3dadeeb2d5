"""Who puts in order what a process leaves behind when it dies in any way: its heir, a process that waits on a pipe which dies
with it. Its module asks ``inherited`` at its start, and acts when that says so."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

_DISMISSED = "done"


class Heir:
    """One that waits. ``tell`` gives it a line to remember; after ``dismiss`` it does nothing."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._dismissed = False

    def tell(self, line: str) -> None:
        """One that is gone, or full, is told nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def dismiss(self) -> None:
        self._dismissed = True
        self.tell(_DISMISSED)

    def close(self, deadline_s: float) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            if self._dismissed:  # else it is at work, and goes on without us
                self._process.kill()
                self._process.wait()


@contextlib.contextmanager
def heir(module: str, *words: str, env: Mapping[str, str], deadline_s: float = 60.0) -> Iterator[Heir]:
    """``python -m MODULE WORDS`` beside this block. When the block ends without a ``dismiss`` it acts; that is
    waited for up to ``deadline_s``, and goes on if it takes longer."""
    process = subprocess.Popen([sys.executable, "-m", module, *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, env=dict(env), start_new_session=True, text=True)  # fmt: skip
    made = Heir(process)
    try:
        yield made
    finally:
        made.close(deadline_s)


def inherited() -> list[str] | None:
    """Waits for the end of standard input: what was told, or None when there is nothing to do."""
    told = sys.stdin.read().splitlines()
    return None if told[-1:] == [_DISMISSED] else told
