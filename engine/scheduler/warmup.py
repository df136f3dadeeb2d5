"""The warm-up: one real completion in every mode that the flags enable, one at a time, before the server says READY.

A path that cannot run dies here. Warm-up requests never share a batch with each other or with anybody's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from engine.config import Settings
from engine.messages import Finish, Generate, Grammar, Outputs, Refused, Sampling


class WarmupError(RuntimeError):
    """A mode that the flags enable does not work; the text names it and says why."""


_SCHEMA = '{"type":"object","properties":{"ok":{"type":"boolean"}},"required":["ok"],"additionalProperties":false}'


def requests(settings: Settings, prompt: list[int], most: int) -> Iterator[Generate]:
    """The completions to make. ``prompt`` is a few tokens of real text, ``most`` the longest prompt that fits."""

    def ask(mode: str, ids: list[int], grammar: Grammar | None = None, tokens: int = 8) -> Generate:
        return Generate(rid=f"warmup-{mode}", input_ids=ids[:most], grammar=grammar,
                        sampling=Sampling(seed=1, temperature=0.0, max_tokens=tokens, ignore_eos=grammar is None))  # fmt: skip

    yield ask("plain", prompt)
    if settings.speculation.algorithm != "NONE":
        yield ask("speculation", prompt * 4)
    chunk = settings.scheduler.chunked_prefill_size
    if 0 < chunk < most:
        yield ask("chunked", (prompt * (chunk // len(prompt) + 2))[: chunk + settings.cache.page_size])
    if settings.grammar.backend != "none":
        yield ask("grammar", prompt, Grammar("json_schema", _SCHEMA), tokens=24)


class Warmup:
    """Runs the requests through the real scheduler. ``add`` takes one, ``turn`` turns the loop once; what the
    scheduler sends meanwhile is to be given to ``take``."""

    def __init__(self, add: Callable[[Generate], None], turn: Callable[[], bool], *, deadline_s: float) -> None:
        self._add = add
        self._turn = turn
        self._deadline_s = deadline_s
        self._ended: dict[str, Finish] = {}
        self._refused: dict[str, str] = {}

    def take(self, outputs: Outputs) -> None:
        for item in outputs.items:
            if isinstance(item, Refused):
                self._refused[item.rid] = item.message
            elif item.finish:
                self._ended[item.rid] = item.finish

    def run(self, request: Generate) -> None:
        """Raises WarmupError when the completion is refused or does not come in time."""
        until = time.monotonic() + self._deadline_s
        self._add(request)
        while request.rid not in self._ended:
            busy = self._turn()
            if request.rid in self._refused:
                raise WarmupError(f"{request.rid}: {self._refused[request.rid]}")
            if time.monotonic() > until:
                raise WarmupError(f"{request.rid}: no completion in {self._deadline_s:g} s")
            if not busy:
                time.sleep(0.002)
        while self._turn():
            pass
