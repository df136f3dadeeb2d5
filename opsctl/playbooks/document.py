"""Reading a playbook: YAML in, a ``Playbook`` out, or every problem with its file and line.

Values are YAML 1.1's, with one exception: ``on``, ``off``, ``yes`` and ``no`` are words, as one means them who writes a flag's value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from opsctl import yamldoc
from opsctl.playbooks.schema import Expectation, Playbook, Step
from opsctl.playbooks.tolerances import problems_of

Where = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class PlaybookError(ValueError):
    """``problems`` holds each thing that is wrong."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


class _Loader(yamldoc.Loader):
    """Safe, and with YAML 1.2's booleans: true and false alone."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))


@dataclass(frozen=True)
class Document:
    """A playbook with the line of each of its parts, for problems that only a look around can find."""

    playbook: Playbook
    source: str
    lines: dict[Where, int]

    def problem(self, path: Where, text: str) -> Problem:
        return Problem(self.source, _line(self.lines, path), f"{_shown(path)}: {text}")

    def steps(self) -> list[tuple[Where, Step]]:
        sections = (("method", self.playbook.method), ("rollbacks", self.playbook.rollbacks))
        return [((section, at), step) for section, steps in sections for at, step in enumerate(steps)]

    def expectations(self) -> list[tuple[Where, Expectation]]:
        after = self.playbook.after if self.playbook.after != "hypothesis" else ()
        sections = (("hypothesis", self.playbook.hypothesis), ("after", after))
        return [((section, at), one) for section, found in sections for at, one in enumerate(found)]


def parse(text: str, source: str) -> Document:
    """``source`` is what errors call the file. Raises PlaybookError with every problem found."""
    try:
        node, raw = yamldoc.load(text, _Loader)
    except yaml.YAMLError as error:
        raise PlaybookError([Problem(source, yamldoc.line(error), f"not YAML: {yamldoc.said(error)}")]) from error
    if node is None or not isinstance(raw, dict):
        raise PlaybookError([Problem(source, 1, "a playbook is a mapping: name, kind, summary, hypothesis, method ...")])
    lines: dict[Where, int] = {}
    twice = _number(node, (), lines)
    if twice:
        raise PlaybookError([Problem(source, line, f"{_shown(path)}: given twice") for path, line in twice])
    try:
        found = Document(Playbook.model_validate(raw), source, lines)
    except ValidationError as error:
        told = {(_line(lines, _own(item["loc"])), _told(item)): None for item in error.errors()}
        raise PlaybookError([Problem(source, line, said) for line, said in told]) from error
    problems = [found.problem(path, text) for path, one in found.expectations() for text in problems_of(one)]
    if problems:
        raise PlaybookError(problems)
    return found


def _number(node: yaml.Node, path: Where, lines: dict[Where, int]) -> list[tuple[Where, int]]:
    """Note the line on which each part begins; returns the keys that are given twice."""
    lines.setdefault(path, node.start_mark.line + 1)
    twice: list[tuple[Where, int]] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in lines:
                twice.append((inner, key.start_mark.line + 1))
            lines[inner] = key.start_mark.line + 1
            twice += _number(value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for at, value in enumerate(node.value):
            twice += _number(value, (*path, at), lines)
    return twice


def _line(lines: dict[Where, int], path: Where) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _own(loc: tuple[int | str, ...]) -> Where:
    """Pydantic's path without the names of a union's branches, which no document holds."""
    return tuple(part for part in loc if isinstance(part, int) or not ("[" in part or part.startswith(("literal", "tuple"))))


def _shown(path: Where) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "playbook"


def _told(item: Any) -> str:
    path = _own(item["loc"])
    if item["type"] == "extra_forbidden":
        known = _keys(path[:-1])
        near = difflib.get_close_matches(str(path[-1]), known, 1)
        return f"{_shown(path)}: unknown key; " + (f'did you mean "{near[0]}"?' if near else f"there are {', '.join(known)}")
    if item["type"] == "missing":
        return f"{_shown(path)}: this key is needed"
    text = item["msg"].removeprefix("Value error, ")
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        near = difflib.get_close_matches(item["input"], re.findall(r"'([^']+)'", item["ctx"]["expected"]), 1)
        return f"{_shown(path)}: {item['input']!r}: {text}" + (f'; did you mean "{near[0]}"?' if near else "")
    return f"{_shown(path)}: {text}" if item["type"] == "value_error" else f"{_shown(path)}: {item['input']!r}: {text}"


def _keys(path: Where) -> list[str]:
    """The keys that the mapping at a path may have, found by walking the models."""
    model: Any = Playbook
    for part in path:
        if isinstance(part, str):
            field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
            model = _inner(field.annotation) if field else None
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _inner(annotation: Any) -> Any:
    """The model inside ``tuple[Model, ...]`` or ``Model | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inner(part)) is not None), None)
