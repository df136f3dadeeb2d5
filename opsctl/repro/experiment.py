"""What an experiment says: the loops that must go on, the requests that are under suspicion, and what makes a run count."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from opsctl.load.shapes import sendable

_SCHEMA = {
    "type": "object",
    "properties": {"item": {"type": "string", "maxLength": 24}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["item", "count"],
    "additionalProperties": False,
}
CONSTRAINED = {"type": "json_schema", "json_schema": {"name": "item", "schema": _SCHEMA, "strict": True}}
_Seconds = Annotated[float, Field(gt=0, le=86400)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Agents(_Table):
    """Loops of unconstrained turns. The context grows with each turn and is trimmed below ``context_tokens``: a turn that
    the server would refuse for its length would end the concurrency that the experiment is about."""

    streams: int = Field(default=1, ge=0, le=250)
    max_tokens: int = Field(default=64, ge=1)
    context_tokens: int = Field(default=2000, ge=64)


class Probes(_Table):
    """The requests under suspicion. ``every_s`` 0: one after another. ``expect``: text, json or "http 400"."""

    constrained: bool = True
    every_s: float = Field(default=0.0, ge=0, le=86400)
    streams: int = Field(default=1, ge=1, le=250)
    max_tokens: int = Field(default=80, ge=1)
    most: int = Field(default=1000, ge=1, le=1_000_000)  # in one run
    expect: str = Field(default="json", pattern=r"^(text|json|http \d{3})$")
    body: dict[str, Any] = Field(default_factory=dict)  # replaces or adds keys of the request

    @model_validator(mode="after")
    def _sendable(self) -> Probes:
        sendable(self.body)
        return self

    @property
    def refused(self) -> bool:
        return self.expect.startswith("http")


class Prefills(_Table):
    """Long prompts of which no token is cached, one after another."""

    streams: int = Field(default=1, ge=1, le=64)
    prompt_tokens: int = Field(ge=16)


class Overlap(_Table):
    """While a probe decodes, so many agents must decode beside it, for at least this share of its time."""

    share: float = Field(ge=0, le=1)
    agents: int = Field(default=1, ge=0)


class Experiment(_Table):
    """``runs`` of ``seconds``. A run has reproduced the fault when held work has not moved for ``stall_s``, or the server
    is gone. ``counts``: the least number of probes that must have been answered (or refused, if so expected)."""

    runs: int = Field(default=3, ge=1, le=1000)
    seconds: _Seconds
    agents: Agents = Agents()
    probes: Probes = Probes()
    prefills: Prefills | None = None
    overlap: Overlap
    stall_s: _Seconds = 20.0
    request_s: _Seconds = 300.0
    counts: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _possible(self) -> Experiment:
        if self.overlap.share > 0 and self.overlap.agents > self.agents.streams:
            raise ValueError(f"overlap.agents: {self.overlap.agents} must decode at once, and agents.streams is {self.agents.streams}")
        if self.overlap.share > 0 and self.overlap.agents < 1:
            raise ValueError("overlap.agents: a share of the time with no agent says nothing; give 1 or more, or share: 0")
        if self.counts > self.probes.most:
            raise ValueError(f"counts: {self.counts} probes are needed and probes.most is {self.probes.most}")
        return self
