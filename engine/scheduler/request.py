"""A request as rank 0's scheduler sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine.cache.memory import Holding
from engine.messages import Generate


class Stage(enum.Enum):
    compiling = "compiling"  # its grammar is not ready
    waiting = "waiting"  # in the queue
    prefill = "prefill"  # some of its tokens are not in the KV cache
    running = "running"  # decoding


@dataclass
class Request:
    """``tokens`` is the prompt and the output so far; ``room`` the output tokens it may have in all."""

    message: Generate
    room: int
    grammar: str = ""
    tokens: list[int] = field(default_factory=list)
    stage: Stage = Stage.waiting
    kv: Holding = field(default_factory=Holding)
    entered: bool = False  # ranks know it
    cached_tokens: int = 0
    prompt_logprobs_sent: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.message.input_ids)

    @property
    def rid(self) -> str:
        return self.message.rid

    @property
    def prompt_length(self) -> int:
        return len(self.message.input_ids)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def planned(self) -> int:
        """KV length once everything that was launched has come back (for a running request: at most)."""
        return self.kv.kv_len + self.kv.ahead
