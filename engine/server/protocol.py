"""The bodies that clients send, as OpenAI names them, with SGLang's and vLLM's names for what OpenAI lacks.

Unknown parameters are refused by name: a parameter that is silently ignored is a wrong answer that nobody notices. Those of
OpenAI's that cannot change what the model says are taken and not looked at (``WITHOUT_EFFECT``).
``null`` means the same as leaving a parameter out.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from engine.server.errors import ApiError, bad

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=128)]


WITHOUT_EFFECT: tuple[tuple[str, str], ...] = (
    ("metadata", "nothing is kept that it could be found by"),
    ("modalities", "text alone is there; another one is refused"),
    ("parallel_tool_calls", "without tools; with them it has its effect"),
    ("prediction", "a hint that would save time; the text is the same without"),
    ("prompt_cache_key", "the prefix cache finds prefixes by their tokens"),
    ("prompt_cache_retention", "prefixes are kept while there is room"),
    ("safety_identifier", "nobody is told; the access line names callers by their key"),
    ("service_tier", "there is one"),
    ("store", "no answer is ever kept"),
    ("user", "as safety_identifier"),
    ("verbosity", "a knob of models that were trained for it, which no model has that is served here"),
)
"""Parameters of OpenAI's that are accepted and do nothing, with the reason, for the reference page."""


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool = False


class StructuredOutputs(Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's way to ask for a grammar; exactly one field."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class Common(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What chat and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    max_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    # Without effect.
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    # Beyond OpenAI.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None  # dividing by less makes infinities
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None


class CalledFunction(Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    arguments: str


class Call(Struct, forbid_unknown_fields=True, frozen=True):
    """A tool call of an earlier answer, as clients send it back."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: Count | None = None


class Message(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, omit_defaults=True):
    """One turn. The fields without a use here are what the SDK's own objects carry when they are sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class Function(Struct, forbid_unknown_fields=True, frozen=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True, frozen=True):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Struct, forbid_unknown_fields=True, frozen=True):
    name: str


class NamedTool(Struct, forbid_unknown_fields=True, frozen=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChatRequest(Common, forbid_unknown_fields=True, kw_only=True, frozen=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None  # a variable of the chat template, as chat_template_kwargs are
    chat_template_kwargs: dict[str, Any] | None = None
    # Without effect.
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class CompletionRequest(Common, forbid_unknown_fields=True, kw_only=True, frozen=True):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Choices | None = None
    suffix: str | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class FaultRequest(Struct, forbid_unknown_fields=True, frozen=True):
    fault: Annotated[str, Meta(min_length=1, max_length=1000)]


_Body = TypeVar("_Body", bound=Struct)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*?)`")
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*?)`")
_AT = re.compile(r" - at `\$(?P<path>.*)`$")


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """The body as ``kind``.

    Raises:
        ApiError: 400, naming the parameter: not JSON, unknown, missing, of the wrong type or out of range.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise bad(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad("the body is nested too deeply", code="invalid_json") from None


def _invalid(text: str) -> ApiError:
    at = _AT.search(text)
    path = at["path"].lstrip(".") if at else ""
    reason = text[: at.start()] if at else text
    for pattern, code, words in (
        (_UNKNOWN, "unknown_parameter", "unknown parameter"),
        (_MISSING, "missing_parameter", "missing parameter"),
    ):
        if found := pattern.match(reason):
            name = f"{path}.{found['field']}" if path else found["field"]
            return bad(f"{words}: {name}", param=name, code=code)
    if not path:
        return bad(f"the body must be a JSON object of parameters: {reason}", code="invalid_json")
    return bad(f"{path}: {reason[:1].lower()}{reason[1:]}", param=path)
