"""One YAML document, read without trust: whatever is wrong with it is a ``yaml.YAMLError``.

PyYAML alone lets a date of month 13 end in a ValueError, a deep nesting in a RecursionError, and a few aliases of aliases
in more values than a memory holds.
"""

from __future__ import annotations

from typing import Any

import yaml

_MOST_NODES = 100_000
_DEEPEST = 100


class Loader(yaml.SafeLoader):
    """Safe, and names the line of a value that is not what its form says."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, OverflowError) as error:
            said = f"{str(node.value)[:60]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, said, node.start_mark) from error


def load(text: str, kind: type[Loader] = Loader) -> tuple[yaml.Node | None, Any]:
    """The document's root node and its value; (None, None) for an empty text.

    Raises yaml.YAMLError: no YAML, more than one document, nested too deep, or more than it seems by its aliases.
    """
    loader = None
    try:
        loader = kind(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _bounded(node)
        return node, loader.construct_document(node)
    except RecursionError as error:
        raise yaml.YAMLError("nested too deep") from error
    finally:
        if loader is not None:
            loader.dispose()


def line(error: yaml.YAMLError) -> int:
    """Where it is, from 1."""
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark is not None else 1


def said(error: yaml.YAMLError) -> str:
    """What is wrong, in one line."""
    return str(getattr(error, "problem", None) or error).partition("\n")[0]


def _bounded(root: yaml.Node) -> None:
    """Counts what the document comes to with each alias written out."""
    left, count = [(root, 1)], 0
    while left:
        node, depth = left.pop()
        count += 1
        if depth > _DEEPEST or count > _MOST_NODES:
            why = "nested too deep" if depth > _DEEPEST else f"more than {_MOST_NODES} values, its aliases written out"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)
        if isinstance(node, yaml.MappingNode):
            left += [(part, depth + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += [(part, depth + 1) for part in node.value]
