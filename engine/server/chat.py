"""/v1/chat/completions: messages to a prompt, and the answer's text to content, reasoning and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.messages import Grammar, Tokens
from engine.server.access import Record
from engine.server.admission import Wish, check_parameters, check_room, generations, off_loop_if_long, stop_strings
from engine.server.answer import Delta, Job
from engine.server.choice import Choice, TokenAt
from engine.server.constraints import forced_tools, grammar_of, shape_of
from engine.server.errors import bad
from engine.server.forced_call import ForcedCallParser
from engine.server.identity import prompt_sha
from engine.server.logprobs import for_chat
from engine.server.protocol import ChatRequest, Message, Tool, decode
from engine.server.service import Service
from engine.server.size import characters_of, check_characters, check_messages
from engine.text.chat_template import TemplateError
from engine.text.events import Content, Event, ParseFailure, Reasoning, ToolCallArguments, ToolCallStart
from engine.text.reasoning import opens_reasoning
from engine.text.stream_parser import StreamParser, TextParser, reasoning_parser, tool_parser


async def admit(service: Service, body: bytes, record: Record) -> Job:
    """The job that a body asks for.

    Raises:
        ApiError: it cannot be had; see ``admission``.
    """
    request = decode(body, ChatRequest)
    record.shape = shape_of(request)
    grammar = grammar_of(request)
    check_parameters(service, request, grammar)
    _check_chat(service, request, grammar)
    record.prompt_sha = prompt_sha(_named_text(request.messages))
    check_room(service, request, 1)
    text, ids = await prompt_of(service, request.messages, _shown_tools(request), _variables(request))
    record.prompt_tokens = len(ids)
    top = request.top_logprobs or 0
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    wish = Wish([ids], limit, name, logprobs=top if request.logprobs else -1)
    requests = generations(service, request, wish, grammar, record.rid)
    answer = ChatAnswer(service, request, grammar, len(requests), starts_inside=opens_reasoning(text))
    usage = bool(request.stream_options and request.stream_options.include_usage)
    return Job(requests, len(requests), answer, "chatcmpl-", bool(request.stream), usage)


async def prompt_of(service: Service, messages: Sequence[Message], tools: Sequence[Tool] | None,
                    variables: dict[str, Any] | None) -> tuple[str, list[int]]:  # fmt: skip
    """The rendered conversation, as text and as ids.

    Raises:
        ApiError: 400: too long to fit, parts that are not text, or the model's template refuses the messages.
    """
    ready = service.serving()
    check_messages(ready, len(messages))
    for number, message in enumerate(messages):
        if message.content is None and message.role in ("user", "tool"):
            name = f"messages[{number}].content"
            raise bad(f"{name}: a message of the {message.role}'s needs one", param=name, code="missing_parameter")
        for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "text" or part.text is None:
                name = f"messages[{number}].content[{at}]"
                raise bad(f"{name}: a part of type {part.type!r} without text; this model reads text only", param=name)
    if taken := sorted({"messages", "tools"} & set(variables or ())):
        raise bad(f"chat_template_kwargs: {taken[0]} is a parameter of its own", param="chat_template_kwargs")
    turns = [_turn(message) for message in messages]
    signatures = [{"type": tool.type, **msgspec.to_builtins(tool)} for tool in tools] if tools else None  # in the order models know
    for signature in signatures or ():
        signature["function"] = {key: value for key, value in signature["function"].items() if value is not None}

    characters = characters_of([turns, signatures, variables])
    check_characters(ready, characters, service.longest_token, param="messages")

    def work() -> tuple[str, list[int]]:
        text = service.tokenizer.render_chat(turns, signatures, **(variables or {}))
        check_characters(ready, len(text), service.longest_token, param="messages")  # keys, and what the template adds
        return text, service.tokenizer.encode(text)

    try:
        return await off_loop_if_long(characters, work)
    except TemplateError as error:
        raise bad(str(error), param="messages", code="chat_template") from error
    except RecursionError:
        raise bad("messages: the arguments of a tool call are nested too deeply", param="messages") from None


def _turn(message: Message) -> dict[str, Any]:
    turn = {key: value for key, value in msgspec.to_builtins(message).items() if value is not None}
    turn["role"] = "system" if message.role == "developer" else message.role
    turn["content"] = message.text()
    return turn


def _named_text(messages: Sequence[Message]) -> str:
    users = [message for message in messages if message.role == "user"]
    return (users or messages)[-1].text()


def _variables(request: ChatRequest) -> dict[str, Any]:
    """What the template may read beside messages and tools; most read no effort."""
    effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    return effort | (request.chat_template_kwargs or {})


def _shown_tools(request: ChatRequest) -> list[Tool] | None:
    return None if request.tool_choice == "none" else request.tools


def _check_chat(service: Service, request: ChatRequest, grammar: Grammar | None) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise bad("top_logprobs: only with logprobs", param="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad("max_tokens: it is the old name of max_completion_tokens; give one of them", param="max_tokens")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(request, name) == 0:
            raise bad(f"{name}: must be at least 1", param=name)
    free = _shown_tools(request) and grammar is None
    if free and service.settings.model.tool_call_parser == "none":
        text = "tool_choice: auto needs a tool-call parser; this server was started with --tool-call-parser none"
        raise bad(text, param="tool_choice")


@dataclass
class _Call:
    id: str
    name: str
    arguments: str = ""
    failed: bool = False

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class _Said:
    """The whole of one choice, as far as it has come."""

    parser: TextParser
    content: str = ""
    reasoning: str = ""
    calls: dict[int, _Call] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    tokens: list[TokenAt] = field(default_factory=list)
    unsent: list[TokenAt] = field(default_factory=list)
    cut: bool = False  # after the first call, where the client wants one


class ChatAnswer:
    """The choices of a chat completion."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, service: Service, request: ChatRequest, grammar: Grammar | None, count: int, *, starts_inside: bool) -> None:
        self._service = service
        self._top = request.top_logprobs or 0
        self._logprobs = bool(request.logprobs)
        self._one_call = request.parallel_tool_calls is False
        skip = request.skip_special_tokens is not False
        self.choices = [
            Choice(service.tokenizer, stops=stop_strings(request), skip_special=skip, min_tokens=request.min_tokens or 0)
            for _ in range(count)
        ]
        self._said = [_Said(_parser(service, request, grammar, starts_inside)) for _ in range(count)]

    def opening(self) -> list[Delta]:
        return [self._delta(index, {"role": "assistant", "content": ""}) for index in range(len(self.choices))]

    def feed(self, index: int, message: Tokens) -> list[Delta]:
        said, choice = self._said[index], self.choices[index]
        piece = choice.feed(message)
        said.tokens += piece.tokens
        said.unsent += piece.tokens
        events = said.parser.feed(piece.text) if piece.text else []
        if choice.finish:
            events += said.parser.finish()
        deltas = [self._delta(index, body) for event in events if (body := self._take(said, event))]
        if self.ended(index):
            deltas.append(self._delta(index, {}, last=True))
        if deltas and self._logprobs:
            deltas[0].body["logprobs"] = for_chat(self._service.tokenizer, said.unsent, self._top)
            said.unsent = []
        return deltas

    def ended(self, index: int) -> bool:
        return bool(self.choices[index].finish) or self._said[index].cut

    def finish_reason(self, index: int) -> str:
        """``tool_calls`` when the answer ended well with calls that are complete."""
        said, finish = self._said[index], self.choices[index].finish or "stop"
        return "tool_calls" if finish == "stop" and any(not call.failed for call in said.calls.values()) else finish

    def whole(self) -> list[dict[str, Any]]:
        return [self._whole(index) for index in range(len(self.choices))]

    def _whole(self, index: int) -> dict[str, Any]:
        said = self._said[index]
        calls = [call.body() for call in said.calls.values() if not call.failed]
        message: dict[str, Any] = {"role": "assistant", "content": said.content if said.content or not calls else None, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if calls:
            message["tool_calls"] = calls
        if said.failures:
            message["parse_failures"] = said.failures
        logprobs = for_chat(self._service.tokenizer, said.tokens, self._top) if self._logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason(index),
                "matched_stop": self.choices[index].matched}  # fmt: skip

    def _take(self, said: _Said, event: Event) -> dict[str, Any] | None:
        """Add an event to the whole; its form as a streamed delta."""
        if said.cut:
            return None
        match event:
            case Content(text):
                said.content += text
                return {"content": text}
            case Reasoning(text):
                said.reasoning += text
                return {"reasoning_content": text}
            case ToolCallStart(number, name):
                if self._one_call and number > 0:
                    said.cut = True
                    return None
                call = said.calls[number] = _Call(f"call_{secrets.token_hex(12)}", name)
                return {"tool_calls": [{"index": number, **call.body()}]}
            case ToolCallArguments(number, text):
                said.calls[number].arguments += text
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}
            case ParseFailure(reason, failed):
                if failed is not None and failed in said.calls:
                    said.calls[failed].failed = True
                said.failures.append(reason)
                self._service.meters.parse_failures.inc()
                return {"parse_failures": [reason]}

    def _delta(self, index: int, body: dict[str, Any], *, last: bool = False) -> Delta:
        finish = self.finish_reason(index) if last else None
        return Delta(index, {"delta": body, "logprobs": None}, finish, self.choices[index].matched)


def _parser(service: Service, request: ChatRequest, grammar: Grammar | None, starts_inside: bool) -> TextParser:
    """An answer that follows a grammar begins with it, so no reasoning and no call of the model's own can be in it."""
    if grammar is not None:
        return ForcedCallParser() if forced_tools(request) else StreamParser()
    model = service.settings.model
    tools = tool_parser(model.tool_call_parser, forbidden=request.tool_choice == "none") if request.tools else None
    return StreamParser(reasoning_parser(model.reasoning_parser, starts_inside=starts_inside), tools)
