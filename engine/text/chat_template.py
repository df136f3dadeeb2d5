"""Chat templates: Jinja in a sandbox, with the helpers that Hugging Face templates expect.

Templates come with the model and are not trusted: the sandbox keeps them from attributes of Python objects and from
changing the messages they are given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(ValueError):
    """A chat template that is missing, broken, or refuses these messages; the text is fit for a client."""


class _Refusal(Exception):
    """``raise_exception`` was called by the template."""


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what a trainer learns from; for serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """Compiled templates by name; ``tool_use`` is taken when tools are given, else ``default``."""

    def __init__(self, sources: Mapping[str, str], *, where: str, now: Callable[[], datetime]) -> None:
        self._where = where
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise TemplateError(f"{where}: chat template {name!r}, line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]) -> str:
        """The prompt.

        Raises:
            TemplateError: the template refuses these messages, or fails on them.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError(f"{self._where}: no chat template is called 'default'; there are: {', '.join(sorted(self._templates))}")
        context = {"add_generation_prompt": True, "documents": None, **variables}
        context["messages"] = [_for_template(message) for message in messages]
        context["tools"] = [dict(tool) for tool in tools] if tools else None
        try:
            return self._templates[name].render(context)
        except _Refusal as refusal:
            raise TemplateError(f"the model's chat template refuses these messages: {refusal}") from refusal
        except jinja2.TemplateError as error:
            raise TemplateError(f"{self._where}: chat template {name!r}: {error.message or type(error).__name__}") from error
        except Exception as error:  # a template is a program: it can fail on these messages in any way Python can
            what = f"{type(error).__name__}: {error}"
            raise TemplateError(f"{self._where}: chat template {name!r} fails on these messages: {what}") from error


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's form to what templates are written for: text as one string, arguments of earlier calls as objects."""
    shaped = dict(message)
    content = shaped.get("content")
    if content is None:
        shaped["content"] = ""
    elif isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        shaped["content"] = "".join(str(part.get("text", "")) for part in content)
    if shaped.get("tool_calls"):
        shaped["tool_calls"] = [_call_for_template(call) for call in shaped["tool_calls"]]
    else:
        shaped.pop("tool_calls", None)
    return shaped


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    shaped = dict(call)
    function = shaped.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return shaped  # the template gets the text as it was sent
        shaped["function"] = {**function, "arguments": arguments}
    return shaped
