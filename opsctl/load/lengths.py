"""How long something is: a number, or a distribution that a seed draws from."""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Tokens = Annotated[int, Field(ge=1, le=1_000_000)]


class _Distribution(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Uniform(_Distribution):
    """Every length from ``least`` to ``most`` alike."""

    kind: Literal["uniform"] = "uniform"
    least: _Tokens
    most: _Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.least > self.most:
            raise ValueError(f"least is {self.least}, above most, which is {self.most}")
        return self

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.least, self.most)


class Lognormal(_Distribution):
    """Many short and few long, as people's prompts are. ``sigma`` is that of the logarithm; ``most`` cuts the tail."""

    kind: Literal["lognormal"]
    median: _Tokens
    sigma: float = Field(ge=0, le=4)
    most: _Tokens

    def draw(self, chance: random.Random) -> int:
        return max(1, min(self.most, round(self.median * chance.lognormvariate(0.0, self.sigma))))


class Choice(_Distribution):
    """One of these, each as likely as its share of the list: lengths taken from a recording."""

    kind: Literal["choice"]
    of: Annotated[tuple[_Tokens, ...], Field(min_length=1)]

    def draw(self, chance: random.Random) -> int:
        return chance.choice(self.of)


Distribution = Annotated[Uniform | Lognormal | Choice, Field(discriminator="kind")]
Length = _Tokens | Distribution


def draw(length: Length, chance: random.Random) -> int:
    """One length. A plain number takes nothing from ``chance``."""
    return length if isinstance(length, int) else length.draw(chance)
