"""What is sent: shapes of requests, each with its share of the traffic, read from a TOML or YAML file.

A shape draws its requests from a seed, so that two servers, or one server on two days, are asked the same things.
Prompts are random words: no request finds another's in the prefix cache, unless a system prompt is shared; and none finds
those of an earlier run with the same seed, for a run's own words stand before them.
"""

from __future__ import annotations

import hashlib
import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from opsctl import textfile, yamldoc
from opsctl.load import lengths
from opsctl.load.lengths import Length

_WORDS = """
river stone window paper garden morning engine letter silver bridge market candle winter harbour signal copper forest
kitchen ladder mirror north ocean pencil quiet road school table under valley water yellow apple basket circle dinner
evening farmer gentle hammer island jacket kettle lantern meadow number orange picture quarter rabbit summer teacher
uncle village weather young answer button corner doctor energy flower ground history inside journey knowledge little
machine nature office people question reason season travel useful visit wonder
""".split()  # noqa: SIM905 (a list of a hundred quoted words reads worse)
_FRESH = 5
TOKENS_PER_WORD = 1.3  # of the words above, until the server has counted some


class ShapeError(ValueError):
    """A file of shapes that cannot be used. One line a problem: file, key, what is wrong."""


class Shape(BaseModel):
    """One kind of request. ``prompt`` is a fixed text; without it ``prompt_tokens`` random ones are asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    share: float = Field(default=1.0, gt=0, le=1e6)
    route: Literal["chat", "completions"] = "chat"
    prompt: str = ""
    prompt_tokens: Length = 128
    system: str = ""
    max_tokens: Length = 64
    stream: bool = True
    temperature: float = Field(default=0.0, ge=0)
    ignore_eos: bool = False  # not in OpenAI's API: SGLang, vLLM and the bundled engine know it
    response_format: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    extra: dict[str, Any] = Field(default_factory=dict)  # goes into the body as it is
    expect: str = "text"  # text | json | tool_call | "http 400"

    @model_validator(mode="after")
    def _sendable(self) -> Shape:
        sendable([self.prompt, self.system, self.temperature, self.response_format, self.tools, self.extra])
        return self

    @field_validator("expect")
    @classmethod
    def _known(cls, value: str) -> str:
        word, _, code = value.partition(" ")
        if value in ("text", "json", "tool_call") or (word == "http" and code.isdigit() and len(code) == 3):
            return value
        raise ValueError(f'"{value}" is no expectation; use "text", "json", "tool_call" or "http 400"')

    def body(
        self, model: str, chance: random.Random, *, tokens_per_word: float = TOKENS_PER_WORD, fresh: Sequence[str] = ()
    ) -> dict[str, Any]:
        """One request's body. ``fresh``: words that random prompts begin with (``fresh_words``), instead of drawn ones."""
        words = max(1, round(lengths.draw(self.prompt_tokens, chance) / tokens_per_word))
        prompt = self.prompt or " ".join([*fresh, *chance.choices(_WORDS, k=words)[len(fresh) :]])
        body: dict[str, Any] = {"model": model, "max_tokens": lengths.draw(self.max_tokens, chance), "temperature": self.temperature}
        if self.route == "chat":
            system = [{"role": "system", "content": self.system}] if self.system else []
            body["messages"] = [*system, {"role": "user", "content": prompt}]
        else:
            body["prompt"] = f"{self.system}\n{prompt}" if self.system else prompt
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.response_format is not None:
            body["response_format"] = self.response_format
        if self.tools:
            body["tools"] = list(self.tools)
        return {**body, **self.extra}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.route == "chat" else "/v1/completions"


def sendable(value: Any) -> None:
    """Raises ValueError for what is no JSON: YAML and TOML know dates, and numbers that are none."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be sent as JSON: {error}") from error


def fresh_words(of: str) -> tuple[str, ...]:
    """Some words by which the prompts of one run begin, ``of`` its name: no prefix cache holds what an earlier run with the
    same seed asked, and every prompt keeps its length."""
    return tuple(random.Random(f"fresh/{of}").choices(_WORDS, k=_FRESH))


PLAIN = Shape(name="plain", ignore_eos=True)


@dataclass(frozen=True)
class Mix:
    """Shapes and a seed. Request number n is always the same one."""

    shapes: tuple[Shape, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        names = [shape.name for shape in self.shapes]
        if not names or len(set(names)) < len(names):
            raise ShapeError(f"shapes must have names of their own, at least one; given: {', '.join(names) or 'none'}")

    def draw(self, number: int) -> tuple[Shape, random.Random]:
        """The shape of request ``number`` and the source of its chances."""
        chance = random.Random(f"{self.seed}/{number}")
        (shape,) = chance.choices(self.shapes, [one.share for one in self.shapes])
        return shape, chance

    def to_json(self) -> list[dict[str, Any]]:
        return [shape.model_dump(mode="json", exclude_defaults=True) for shape in self.shapes]

    @property
    def digest(self) -> str:
        """Of what is sent: two runs with one digest have asked the same things."""
        return hashlib.sha256(json.dumps([self.seed, self.to_json()], sort_keys=True).encode()).hexdigest()[:16]


def load(path: Path) -> tuple[Shape, ...]:
    """The shapes of a file: ``[[shape]]`` in TOML, a list ``shape:`` in YAML. Raises ShapeError."""
    try:
        text = textfile.read(path)
        raw = yamldoc.load(text)[1] if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except OSError as error:
        raise ShapeError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # also a number of five thousand digits in TOML
        raise ShapeError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, Mapping) or not isinstance(raw.get("shape"), list) or set(raw) != {"shape"}:
        raise ShapeError(f"{path}: expected one list named shape ([[shape]] in TOML), and nothing else")
    return parse(raw["shape"], str(path))


def parse(tables: Sequence[Any], source: str) -> tuple[Shape, ...]:
    """Shapes from plain values. ``source`` is what errors call the place. Raises ShapeError with every problem."""
    found, problems = [], []
    for at, table in enumerate(tables):
        try:
            found.append(Shape.model_validate(table))
        except ValidationError as error:
            for item in error.errors():
                key = ".".join(str(part) for part in item["loc"] if part not in ("uniform", "lognormal", "choice", "constrained-int"))
                problems.append(f"{source}: shape[{at}]{'.' + key if key else ''}: {item['msg'].removeprefix('Value error, ')}")
    if problems:
        raise ShapeError("\n".join(dict.fromkeys(problems)))
    if not found:
        raise ShapeError(f"{source}: no shape")
    return Mix(tuple(found)).shapes
