"""Whether a request can be served, and what exactly the scheduler is asked: limits, defaults, prompts, seeds.

The order is cheap to dear: what a look at the parameters can refuse is refused before the prompt is tokenised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.messages import Generate, Grammar, Ready, Sampling
from engine.server.errors import GRAMMAR_OFF, ApiError, bad
from engine.server.protocol import Common
from engine.server.service import Service
from engine.server.size import check_tokens, most_tokens

_MOST_STOPS = 16
_LONGEST_STOP = 1024  # characters
_LONG_TEXT = 16_384  # characters; tokenising more would hold up the other requests
_SEED_MASK = 2**63 - 1
_FULL_RETRY_S = 1
_LONGEST_ID = 10  # digits
_LONGEST_SHOWN = 40  # characters of a wrong value in an error
_T = TypeVar("_T")


@dataclass(frozen=True)
class Wish:
    """What a request of either route comes down to, with its prompts as ids.

    ``max_tokens``: None asks for all that fits. ``logprobs`` and ``prompt_logprobs`` are as in ``messages.Generate``.
    """

    prompts: Sequence[Sequence[int]]
    max_tokens: int | None
    max_tokens_name: str
    logprobs: int = -1
    prompt_logprobs: int = -1


def check_parameters(service: Service, request: Common, grammar: Grammar | None) -> None:
    """Refuse what no prompt could make right.

    Raises:
        ApiError: 400 or 404; under ``--grammar-backend none`` every grammar, in SGLang's words.
    """
    if grammar is not None and service.settings.grammar.backend == "none":
        raise ApiError(400, GRAMMAR_OFF, code="grammar_disabled")
    service.check_model(request.model)
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options: only with stream", param="stream_options")
    if request.top_p == 0:
        raise bad("top_p: 0 leaves no token; use temperature 0 for greedy", param="top_p")
    stops = stop_strings(request)
    if len(stops) > _MOST_STOPS:
        raise bad(f"stop: {len(stops)} strings; at most {_MOST_STOPS}", param="stop")
    if any(not stop or len(stop) > _LONGEST_STOP for stop in stops):
        raise bad(f"stop: each string must have 1 to {_LONGEST_STOP} characters", param="stop")
    if grammar is not None and request.ignore_eos:
        raise bad("ignore_eos: an answer that follows a grammar ends where the grammar does", param="ignore_eos")


def check_room(service: Service, request: Common, prompts: int) -> None:
    """Refuse what the queue cannot take.

    Raises:
        ApiError: 503 with Retry-After when full; 400 when it would not fit into an empty one.
    """
    wanted, room = check_count(service, request, prompts)
    if service.link.in_flight + wanted > room:
        text = f"the queue is full: {service.link.in_flight} requests in flight, at most {room}"
        raise ApiError(503, text, code="queue_full", retry_after_s=_FULL_RETRY_S)


def check_count(service: Service, request: Common, prompts: int) -> tuple[int, int]:
    """How many answers are wanted, and how many an empty queue can take.

    Raises:
        ApiError: 400: the first is more than the second.
    """
    scheduler = service.settings.scheduler
    room = scheduler.max_queued_requests + scheduler.max_running_requests
    wanted = prompts * (request.n or 1)
    if wanted > room:
        raise bad(f"n: {wanted} answers at once; this server takes at most {room}", param="n")
    return wanted, room


def stop_strings(request: Common) -> tuple[str, ...]:
    stop = request.stop
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def generations(service: Service, request: Common, wish: Wish, grammar: Grammar | None, rid: str) -> list[Generate]:
    """One message for each answer, in the order of OpenAI's ``index``: all of the first prompt, then the next.

    Raises:
        ApiError: 400: an empty prompt, ids that the model does not have, more tokens than the context.
    """
    ready, usual = service.serving(), service.sampling
    n = request.n or 1
    seed = request.seed if request.seed is not None else service.draw_seed()
    bias = _bias(request, ready)
    extra_stops = tuple(request.stop_token_ids or ())
    if wrong := next((token for token in extra_stops if token >= ready.vocab_size), None):
        raise bad(f"stop_token_ids: {wrong} is not below the vocabulary's {ready.vocab_size}", param="stop_token_ids")
    made: list[Generate] = []
    for prompt in wish.prompts:
        budget = _budget(prompt, wish, ready)
        if (request.min_tokens or 0) > budget:
            raise bad(f"min_tokens: {request.min_tokens} is more than the {budget} tokens the answer may have", param="min_tokens")
        for _ in range(n):
            number = len(made)
            sampling = Sampling(
                seed=(seed + number % n) & _SEED_MASK, max_tokens=budget,
                temperature=_or(request.temperature, usual.temperature), top_p=_or(request.top_p, usual.top_p),
                top_k=max(_or(request.top_k, usual.top_k), 0), min_p=_or(request.min_p, usual.min_p),
                frequency_penalty=_or(request.frequency_penalty, 0.0), presence_penalty=_or(request.presence_penalty, 0.0),
                repetition_penalty=_or(request.repetition_penalty, usual.repetition_penalty), min_tokens=request.min_tokens or 0,
                stop_token_ids=extra_stops, ignore_eos=bool(request.ignore_eos), logit_bias=bias,
            )  # fmt: skip
            name = rid if n * len(wish.prompts) == 1 else f"{rid}-{number}"
            made.append(Generate(rid=service.link.unique(name), input_ids=list(prompt), sampling=sampling, grammar=grammar,
                                 logprobs=wish.logprobs, prompt_logprobs=wish.prompt_logprobs))  # fmt: skip
    return made


async def off_loop_if_long(size: int, work: Callable[[], _T]) -> _T:
    """Run ``work`` here, or in a thread when ``size`` characters of text make it long."""
    return work() if size <= _LONG_TEXT else await asyncio.to_thread(work)


def _budget(prompt: Sequence[int], wish: Wish, ready: Ready) -> int:
    if not prompt:
        raise bad("the prompt is empty", code="empty_prompt")
    check_tokens(ready, len(prompt))
    if wrong := next((token for token in prompt if not 0 <= token < ready.vocab_size), None):
        raise bad(f"prompt: the id {wrong} is not in the vocabulary of {ready.vocab_size}", param="prompt")
    limit, what = most_tokens(ready)
    room = limit - len(prompt)
    if wish.max_tokens is None:
        return room
    if wish.max_tokens > room:
        text = (f"the prompt has {len(prompt)} tokens and {wish.max_tokens_name} is {wish.max_tokens}, {len(prompt) + wish.max_tokens} "
                f"together; {what} holds {limit}")  # fmt: skip
        raise bad(text, param=wish.max_tokens_name, code="context_length_exceeded")
    return max(wish.max_tokens, 1)


def _bias(request: Common, ready: Ready) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _LONGEST_ID) or int(key) >= ready.vocab_size:
            raise bad(f"logit_bias: {key[:_LONGEST_SHOWN]!r} is not a token id below {ready.vocab_size}", param="logit_bias")
        bias[int(key)] = value
    return bias


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
