"""What the API process and rank 0 say to each other: msgpack over two ZMQ PUSH/PULL pairs.

The API process binds ``from-scheduler.sock`` and rank 0 binds ``to-scheduler.sock``, both in the launcher's private
socket folder. A frame holds one message. Neither side waits for the other: every answer carries the request id (or
the call id of an administrative call) that it belongs to.
"""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
Finish = Literal["", "stop", "length", "abort", "error"]
"""Empty: the request goes on."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. ``seed`` is always set: the API process draws one where the client gave none."""

    seed: int
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-text ids
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}


class Grammar(msgspec.Struct, frozen=True):
    """``text``: JSON schema, regular expression, EBNF or structural tag (JSON); empty for json_object."""

    kind: GrammarKind
    text: str = ""


# To rank 0.


class Generate(msgspec.Struct, tag=True, kw_only=True):
    rid: str
    input_ids: list[int]
    sampling: Sampling
    grammar: Grammar | None = None
    logprobs: int = -1  # -1: none; 0: of the chosen token; k: and of the k likeliest
    prompt_logprobs: int = -1  # the same for the prompt's own tokens (the first has none)
    probe: bool = False  # a health probe: goes to the head of the queue


class Abort(msgspec.Struct, tag=True):
    """The client has gone, or has what it wants. Unknown ids are ignored."""

    rid: str


class SetFault(msgspec.Struct, tag=True):
    call: str
    spec: str  # NAME[:key=value,...]


class ClearFault(msgspec.Struct, tag=True):
    call: str
    name: str = ""  # empty: all


class Drain(msgspec.Struct, tag=True):
    """Take nothing new, finish what runs; ``Drained`` answers."""


ToScheduler = Generate | Abort | SetFault | ClearFault | Drain


# From rank 0.


class TokenLogprob(msgspec.Struct, array_like=True):
    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Tokens(msgspec.Struct, tag=True, kw_only=True):
    """New tokens of a request, in order. The last message of a request has ``finish`` set.

    ``finish == "stop"``: an end-of-text or stop id was drawn; it is the last of ``ids`` and ``matched`` names it.
    ``prompt_logprobs`` comes once, with the first message, if it was asked for: one entry for each prompt token
    after the first.
    """

    rid: str
    ids: list[int]
    finish: Finish = ""
    matched: int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] | None = None
    error: str = ""
    blamed: bool = False  # the error is the request's own doing: 400, so that nobody tries it again


class Refused(msgspec.Struct, tag=True):
    """The request was not taken: ``status`` is the HTTP status, ``message`` is for the client."""

    rid: str
    status: int
    message: str
    kind: str = "invalid_request_error"
    retry_after_s: int = 0


class FaultAnswer(msgspec.Struct, tag=True):
    call: str
    ok: bool
    message: str
    armed: list[str]


class RankInfo(msgspec.Struct):
    rank: int
    dp: int
    pp: int
    tp: int
    ep: int
    node: int
    pid: int
    config_digest: str


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """Once, after load and warm-up, from rank 0. ``paths`` says which implementations run."""

    context_length: int
    vocab_size: int
    eos_ids: list[int]
    pool_tokens: int
    ranks: list[RankInfo]
    paths: dict[str, str]


class Drained(msgspec.Struct, tag=True):
    pass


class Outputs(msgspec.Struct, tag=True):
    """All that one step gave, in one frame."""

    items: list[Tokens | Refused]


FromScheduler = Outputs | Ready | FaultAnswer | Drained

to_scheduler = msgspec.msgpack.Decoder(ToScheduler)
from_scheduler = msgspec.msgpack.Decoder(FromScheduler)
encode = msgspec.msgpack.Encoder().encode
