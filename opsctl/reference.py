"""The whole reference page, docs/REFERENCE.md: the engine's tables, then the fleet file, exit codes and every command.

All of it is read from the code: keys from the models that validate the fleet file, with the comment that stands behind
each in the source; commands and options from the command lines themselves.
"""

from __future__ import annotations

import enum
import inspect
import io
import json
import re
import tokenize
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import typer
from pydantic import BaseModel

from engine import reference as of_the_engine
from engine.reference import Table
from monitors import fleet
from monitors.exit_codes import ExitCode
from opsctl import commandline
from opsctl.playbooks.schema import Playbook
from opsctl.playbooks.tolerances import PROBES

_FIELD = re.compile(r"^\s*(?P<name>[A-Za-z_]+)\s*(?::|=)")


def fleet_keys() -> Table:
    rows = tuple(_keys(fleet.Fleet, ""))
    intro = (
        "`fleet.toml`, as hang-monitor and opsctl read it. `NAME` is a deployment's own name; a key with `[]` may be given again and again."
    )
    return Table("The fleet file", intro, ("key", "type", "default", "meaning"), rows)


def playbook_keys() -> Table:
    rows = tuple(_keys(Playbook, ""))
    intro = "YAML in `playbooks/`, beside the fleet file or packaged; `opsctl playbook lint` names file and line of what is wrong."
    return Table("Playbooks", intro, ("key", "type", "default", "meaning"), rows)


def _keys(model: type[BaseModel], at: str, shown_at: dict[type[BaseModel], str] | None = None) -> Iterator[tuple[str, str, str, str]]:
    """A row for each key below a table. A kind of table that was shown before is named and not shown again."""
    shown_at = {} if shown_at is None else shown_at
    comments = _comments(model)
    for name, field in model.model_fields.items():
        if (at, name) in (("", "path"), ("deployment.NAME", "name")):
            continue  # filled in by whoever reads the file
        key = f"{at}.{name}" if at else name
        inner, many = _table_of(field.annotation)
        if inner is not None:
            below = f"{key}.NAME" if get_origin(field.annotation) is dict else f"{key}[]" if many else key
            said = comments.get(name) or _first_sentence(inner)
            if inner in shown_at:
                yield f"`{below}`", f"as `{shown_at[inner]}`", "", said
                continue
            shown_at[inner] = below
            yield f"`{below}`", "table", "", said
            yield from _keys(inner, below, shown_at)
            continue
        default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        shown = "needed" if field.is_required() else "" if default in ("", (), {}, None) else f"`{json.dumps(default)}`"
        yield f"`{key}`", _type(field.annotation), shown, comments.get(name, "")


def _table_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model of a table or of a list or mapping of tables, and whether there may be many."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for part in get_args(annotation):
        found, many = _table_of(part)
        if found is not None:
            return found, many or get_origin(annotation) is tuple
    return None, False


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is None:
        return str(getattr(annotation, "__name__", annotation))
    if str(origin) == "typing.Literal":
        return " or ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return "table"
    return _type(parts[0])


def _comments(owner: type) -> dict[str, str]:
    """The comment behind each field or member, from the source."""
    found: dict[str, str] = {}
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(owner)).readline):
        if token.type == tokenize.NAME and (match := _FIELD.match(token.line)):
            name = match["name"]
        elif token.type == tokenize.COMMENT and name and token.line[: token.start[1]].strip():
            found.setdefault(name, token.string.lstrip("# "))
    return found


def _first_sentence(model: type) -> str:
    return " ".join((inspect.getdoc(model) or "").split()).split(". ")[0].rstrip(".")


def exit_codes() -> Table:
    comments = _comments(ExitCode)
    rows = tuple((str(int(code)), _word(code), comments[code.name]) for code in ExitCode)
    intro = "A page that was due and did not go out turns 0 into 1 and leaves the others."
    return Table("Exit codes of `opsctl` and `hang-monitor`", intro, ("code", "name", "meaning"), rows)


def _word(code: enum.Enum) -> str:
    return code.name.lower()


def probes() -> Table:
    rows = tuple(
        (f"`{probe.name}`", ", ".join(f"`{name}`" + ("" if value is None else f"={value}") for name, value in probe.tolerances.items()),
         probe.meaning) for probe in PROBES.values()
    )  # fmt: skip
    return Table(
        "Probes of playbooks", "What `hypothesis` and `after` may ask for.", ("probe", "tolerances and defaults", "it passes when"), rows
    )


def commands(program: str) -> Table:
    root = commandline.programs()[program]
    rows = tuple(row for path, command in _leaves(program, root) for row in _command(path, command))
    return Table(f"Commands of `{program}`", "", ("command", "argument or option", "default", "meaning"), rows)


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name in command.commands:
            yield from _leaves(f"{path} {name}", command.commands[name])
    elif not command.hidden:
        yield path, command


def _command(path: str, command: Any) -> Iterator[tuple[str, str, str, str]]:
    yield f"`{path}`", "", "", " ".join((command.help or "").split("\n\n")[0].split())
    for one in command.params:
        if one.name == "help" or getattr(one, "hidden", False):
            continue
        is_option = one.param_type_name == "option"
        shown = (
            ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts)) if is_option else f"`{(one.metavar or one.name).upper()}`"
        )
        given = one.default
        plain = isinstance(given, str | int | float) and not isinstance(given, bool) and given != ""
        default = "needed" if one.required else f"`{given}`" if plain else ""
        yield "", shown, default, " ".join((getattr(one, "help", "") or "").split())


def page() -> str:
    """The whole page."""
    ours = (fleet_keys(), exit_codes(), commands("opsctl"), commands("hang-monitor"), playbook_keys(), probes())
    return "\n".join((of_the_engine.page(), *(table.markdown() for table in ours)))


def reference(context: typer.Context) -> None:
    """Print the whole reference page, made from the code."""
    context.obj.stdout.write(page())
