"""The flags that matter, and the files that stand behind them: set, not set, or not to be told. Pure but for ``table``."""

from __future__ import annotations

import functools
import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from monitors.judge.scene import Scene

DEFAULT = "the engine's default"
_UNTOLD = "its command line and settings could not be read"


@dataclass(frozen=True)
class Flag:
    """``state``: set, not set, unknown. ``text``: the value, what its absence means, or why it is not known. ``source``: where
    it was read, or that nobody gave it."""

    name: str
    state: str
    text: str
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def table() -> Mapping[str, Any]:
    return tomllib.loads((resources.files("opsctl.triage") / "flags.toml").read_text(encoding="utf-8"))


def flags(scene: Scene, commands: Iterable[Sequence[str]]) -> tuple[Flag, ...]:
    """By the declared settings of a black box, else by a command line: one that a service manager told (``commands``),
    or that stands in a process's title or a unit's ``ExecStart``."""
    box = next(iter(scene.boxes.values()), None)
    settings = json.loads(box.settings_json or "{}") if box is not None else None
    argvs = [list(argv) for argv in commands if argv] or _seen(scene)
    return tuple(_flag(row, settings, argvs, scene.dialect.name) for row in table()["flag"])


def _flag(row: Mapping[str, Any], settings: Mapping[str, Any] | None, argvs: Sequence[Sequence[str]], engine: str) -> Flag:
    off = row.get("off", [""])
    if settings and row.get("setting"):
        value: Any = settings
        for key in row["setting"].split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            absent = value is False or str(value) in off
            given = any(_value(argv, flag) is not None for flag in row["flags"] for argv in argvs)
            source = "black box" if given or not argvs else DEFAULT
            return Flag(row["name"], "not set" if absent else "set", row["absent"] if absent else str(value), source)
    if not argvs:
        return Flag(row["name"], "unknown", _UNTOLD)
    for flag in row["flags"]:
        for argv in argvs:
            value = _value(argv, flag)
            if value is not None:
                absent = value.lower() in [word.lower() for word in off if word]
                return Flag(row["name"], "not set" if absent else "set", row["absent"] if absent else value, "command line")
    default = row.get("default", {}).get(engine)
    if default is not None:
        return Flag(row["name"], "set", default, DEFAULT)
    return Flag(row["name"], "not set", row["absent"], "command line")


def _value(argv: Sequence[str], flag: str) -> str | None:
    """A flag's value; ``on`` for one without; None when it is not there. The dialects of flags know ``_`` and ``-`` alike."""
    for at, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != flag:
            continue
        if equals:
            return value
        follows = argv[at + 1] if at + 1 < len(argv) else "--"
        return follows if not follows.startswith("--") else "on"
    return None


def _seen(scene: Scene) -> list[list[str]]:
    """Command lines that stand in the evidence. A rank's own title names no flag: only one with flags is a command line."""
    texts = [process.title for process in scene.processes]
    texts += [unit.values["ExecStart"] for unit in scene.units if "ExecStart" in unit.values]
    found = []
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError:
            words = text.split()
        if any(word.startswith("--") for word in words):
            found.append(words)
    return found


def files(model: str, listing: Sequence[str] | None, why: str) -> tuple[Flag, ...]:
    """Which files the model folder has. ``listing`` None: it could not be looked into, for the reason ``why``."""
    if listing is None:
        return tuple(Flag(row["name"], "unknown", why or _UNTOLD) for row in table()["file"])
    held = set(listing)
    return tuple(
        Flag(row["name"], "set" if row["name"] in held else "not set", "present" if row["name"] in held else row["absent"], model)
        for row in table()["file"]
    )


def model_folder(found: Sequence[Flag]) -> str:
    """The folder of the model, or of its tokenizer where that is another one; empty when no flag names it."""
    named = {flag.name: flag.text for flag in found if flag.state == "set"}
    return named.get("tokenizer") or named.get("model", "")
