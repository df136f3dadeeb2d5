"""/v1/completions: plain prompts, as text or ids, with echo and the prompt's own log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.messages import Ready, TokenLogprob, Tokens
from engine.server.access import Record
from engine.server.admission import Wish, check_count, check_parameters, check_room, generations, off_loop_if_long, stop_strings
from engine.server.answer import Delta, Job
from engine.server.choice import Choice, TokenAt
from engine.server.constraints import grammar_of, shape_of
from engine.server.errors import bad
from engine.server.identity import prompt_sha
from engine.server.logprobs import for_completion
from engine.server.protocol import CompletionRequest, decode
from engine.server.service import Service
from engine.server.size import check_characters, check_tokens


async def admit(service: Service, body: bytes, record: Record) -> Job:
    """The job that a body asks for.

    Raises:
        ApiError: it cannot be had; see ``admission``.
    """
    request = decode(body, CompletionRequest)
    record.shape = shape_of(request)
    grammar = grammar_of(request)
    check_parameters(service, request, grammar)
    _check_completion(request)
    _check_size(service, request)
    prompts = split_prompts(request.prompt)
    first = prompts[0]
    record.prompt_sha = prompt_sha(first if isinstance(first, str) else " ".join(map(str, first)))
    check_room(service, request, len(prompts))
    ready = service.serving()
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    tokenised = await off_loop_if_long(size, lambda: [_ids(service, ready, prompt) for prompt in prompts])
    record.prompt_tokens = sum(map(len, tokenised))
    asked = -1 if request.logprobs is None else request.logprobs
    wish = Wish(tokenised, request.max_tokens, "max_tokens", logprobs=asked, prompt_logprobs=asked if request.echo else -1)
    requests = generations(service, request, wish, grammar, record.rid)
    n = request.n or 1
    repeated = [prompt for prompt in zip(prompts, tokenised, strict=True) for _ in range(n)]
    answer = CompletionAnswer(service, request, repeated)
    usage = bool(request.stream_options and request.stream_options.include_usage)
    return Job(requests, n, answer, "cmpl-", bool(request.stream), usage)


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """OpenAI's four forms (a text, texts, ids, lists of ids) as a list of prompts.

    Raises:
        ApiError: 400: a mixture, or nothing.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad("prompt: empty", param="prompt", code="empty_prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
        return list(prompt)
    raise bad("prompt: give a text, a list of texts, a list of token ids or a list of lists of token ids", param="prompt")


def _check_size(service: Service, request: CompletionRequest) -> None:
    """Refuse by length alone. What is none of OpenAI's four forms is left to ``split_prompts``."""
    ready, prompt = service.serving(), request.prompt
    if isinstance(prompt, list) and prompt and type(prompt[0]) is not int:
        check_count(service, request, len(prompt))
        prompts: list[Any] = prompt
    else:
        prompts = [prompt]
    for one in prompts:
        if isinstance(one, str):
            check_characters(ready, len(one), service.longest_token, param="prompt")
        elif isinstance(one, list):
            check_tokens(ready, len(one))


def _ids(service: Service, ready: Ready, prompt: str | list[int]) -> list[int]:
    """Checked at once, so that one prompt that is too long ends the tokenising of many."""
    ids = service.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt
    check_tokens(ready, len(ids))
    return ids


def _check_completion(request: CompletionRequest) -> None:
    if request.suffix is not None:
        raise bad("suffix: filling a gap is not supported", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad(f"best_of: {request.best_of} is not n; choosing the best of more answers is not supported", param="best_of")
    if request.max_tokens == 0 and not request.echo:
        raise bad("max_tokens: must be at least 1 (0 only with echo)", param="max_tokens")
    if request.stream and request.echo and request.logprobs is not None:
        raise bad("echo: with logprobs it cannot be streamed", param="echo")


@dataclass
class _Said:
    text: str
    tokens: list[TokenAt] = field(default_factory=list)
    unsent: list[TokenAt] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] | None = None


class CompletionAnswer:
    """The choices of a plain completion. ``prompts``: text and ids of each choice's prompt."""

    object_name = chunk_name = "text_completion"

    def __init__(self, service: Service, request: CompletionRequest, prompts: Sequence[tuple[str | list[int], list[int]]]) -> None:
        self._tokenizer = service.tokenizer
        self._asked = request.logprobs
        self._prompts = prompts
        self._nothing_new = request.max_tokens == 0  # the scheduler was asked for one token, which is dropped
        skip = request.skip_special_tokens is not False
        self.choices = [
            Choice(service.tokenizer, stops=stop_strings(request), skip_special=skip, min_tokens=request.min_tokens or 0) for _ in prompts
        ]
        self._echoed = [self._prompt_text(prompt, skip) if request.echo else "" for prompt, _ in prompts]
        # A prompt of one token has no probabilities to wait for: its only token comes first, with none.
        self._said = [_Said(text, prompt_logprobs=[] if request.echo and len(ids) == 1 else None)
                      for text, (_, ids) in zip(self._echoed, prompts, strict=True)]  # fmt: skip

    def _prompt_text(self, prompt: str | list[int], skip: bool) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special=skip)

    def opening(self) -> list[Delta]:
        return [self._delta(index, text, []) for index, text in enumerate(self._echoed) if text]

    def feed(self, index: int, message: Tokens) -> list[Delta]:
        said, choice = self._said[index], self.choices[index]
        if message.prompt_logprobs is not None:
            said.prompt_logprobs = message.prompt_logprobs
        piece = choice.feed(message)
        if self._nothing_new:
            choice.used, choice.finish, choice.matched = 0, choice.finish and "length", None
            return [self._delta(index, "", [], last=True)] if choice.finish else []
        said.text += piece.text
        said.tokens += piece.tokens
        said.unsent += piece.tokens
        if not piece.text and not choice.finish:
            return []
        unsent, said.unsent = said.unsent, []
        return [self._delta(index, piece.text, unsent, last=bool(choice.finish))]

    def ended(self, index: int) -> bool:
        return bool(self.choices[index].finish)

    def finish_reason(self, index: int) -> str:
        return self.choices[index].finish

    def whole(self) -> list[dict[str, Any]]:
        return [
            {"index": index, "text": said.text, "logprobs": self._logprobs(index, said.tokens, said.prompt_logprobs),
             "finish_reason": self.finish_reason(index), "matched_stop": self.choices[index].matched}
            for index, said in enumerate(self._said)
        ]  # fmt: skip

    def _logprobs(self, index: int, tokens: Sequence[TokenAt], prompt: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if self._asked is None:
            return None
        return for_completion(self._tokenizer, self._prompts[index][1], prompt, tokens, self._asked)

    def _delta(self, index: int, text: str, tokens: Sequence[TokenAt], *, last: bool = False) -> Delta:
        body = {"text": text, "logprobs": self._logprobs(index, tokens, None)}
        return Delta(index, body, self.finish_reason(index) if last else None, self.choices[index].matched)
