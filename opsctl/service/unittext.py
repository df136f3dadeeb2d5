"""What the text of a unit says: the command line, the variables and the settings that a rollout has to know beforehand.

Only what can be told without the machine is understood; whatever else stands there is an error that names the line, so
that a plan never shows something else than what systemd would run. Whoever uses it holds the present text's reading
against systemd's own (``rollout/unitfile.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opsctl.service import dropin
from opsctl.service.manager import ServiceError

_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", '"': '"', "'": "'", "s": " "}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})")
_PREFIXES = "@-:+!|"
_BLANK = " \t\n\r"


@dataclass
class Text:
    """``argv``: of the one ExecStart; ``env``: of Environment; ``settings``: the last value of each key of [Service]."""

    argv: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Why a rollout cannot guard a service with these settings."""
        found = []
        if not self.argv:
            found.append("it has no ExecStart")
        if self.settings.get("KillMode") in ("process", "none"):
            found.append(f"KillMode={self.settings['KillMode']} leaves processes behind at a stop; set KillMode=mixed")
        if self.settings.get("StandardOutput", "journal").split("+")[0] not in ("journal", "inherit"):
            found.append(f"StandardOutput={self.settings['StandardOutput']}: its lines would not be in the journal; leave it out")
        if self.settings.get("Type") == "oneshot" or self.settings.get("RemainAfterExit", "no").lower() in ("yes", "true", "on", "1"):
            found.append("Type=oneshot or RemainAfterExit=: a server that has died would look active; use Type=notify or Type=exec")
        return found


def read(files: Sequence[tuple[str, str]], unit: str, folders: Mapping[str, str] | None = None) -> Text:
    """The unit's file and its drop-ins (name, text), in the order in which they apply. ``folders``: see ``UnitSource``.
    Raises ServiceError."""
    found, specifiers = Text(), {**_specifiers(unit), **(folders or {})}
    for name, text in files:
        for where, key, value in _settings(name, text):
            if key == "ExecStart":
                words = tuple(_words(value, where, specifiers))
                if words and found.argv:
                    raise ServiceError(f"{where}: a second ExecStart; a rollout needs exactly one")
                found.argv = tuple(dropin.unescape(word, where) for word in _command(words, where))
            elif key == "Environment":
                pairs = [word.partition("=") for word in _words(value, where, specifiers)]
                if not pairs:
                    found.env.clear()
                found.env |= {name: text for name, _, text in pairs}
            found.settings[key] = value
    return found


def _settings(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """(where, key, value) of each line of [Service], continued lines joined."""
    section, held, began = "", "", 0
    for number, line in enumerate([*re.split("\r\n|\n|\r", text), ""], 1):
        bare = line.strip(_BLANK)
        if bare[:1] in ("#", ";"):
            continue
        began = began or number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        whole, where = (held + line).strip(_BLANK), f"{name}:{began}"
        held, began = "", 0
        if whole.startswith("["):
            section = whole
        elif section == "[Service]" and whole:
            key, equals, value = whole.partition("=")
            if not equals:
                raise ServiceError(f"{where}: {whole[:60]!r} has no equals sign")
            yield where, key.strip(_BLANK), value.strip(_BLANK)


def _command(words: tuple[str, ...], where: str) -> tuple[str, ...]:
    if words and words[0].startswith(tuple(_PREFIXES)):
        raise ServiceError(f"{where}: ExecStart begins with {words[0][0]!r}, which a rollout's own drop-in could not carry; leave it out")
    if ";" in words:
        raise ServiceError(f"{where}: ExecStart holds several commands; a rollout needs exactly one")
    return words


def _words(value: str, where: str, specifiers: Mapping[str, str]) -> Iterator[str]:
    """As systemd splits a line: quotes are taken away even inside a word, backslashes are C's, percents are specifiers."""
    word: list[str] = []
    inside, quote, at = False, "", 0
    while at < len(value):
        char = value[at]
        at += 1
        if char == "\\":
            text, at = _escape(value, at, where)
            word.append(text)
            inside = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                text, at = _specifier(char, value, at, where, specifiers)
                word.append(text)
        elif char in "\"'":
            quote, inside = char, True
        elif char in _BLANK:
            if inside:
                yield "".join(word)
            word, inside = [], False
        else:
            text, at = _specifier(char, value, at, where, specifiers)
            word.append(text)
            inside = True
    if quote:
        raise ServiceError(f"{where}: a quote is opened and never closed")
    if inside:
        yield "".join(word)


def _escape(value: str, at: int, where: str) -> tuple[str, int]:
    code = _CODE.match(value, at)
    if code:
        digits, base = (code[4], 8) if code[4] else (code[1] or code[2] or code[3], 16)
        return chr(int(digits, base)), code.end()
    if value[at : at + 1] in _ESCAPES and at < len(value):
        return _ESCAPES[value[at]], at + 1
    raise ServiceError(f"{where}: \\{value[at : at + 1]} is no escape that systemd knows; write \\\\ for a backslash")


def _specifier(char: str, value: str, at: int, where: str, known: Mapping[str, str]) -> tuple[str, int]:
    if char != "%":
        return char, at
    name = value[at : at + 1]
    if name not in known:
        raise ServiceError(f"{where}: %{name} is only known on the machine; write its value itself (a percent sign is %%)")
    return known[name], at + 1


def _specifiers(unit: str) -> dict[str, str]:
    name = unit.rpartition(".")[0]
    prefix, _, instance = name.partition("@")
    found = {"%": "%", "n": unit, "N": name, "p": prefix, "i": instance, "j": prefix.rpartition("-")[2]}
    if "-" not in instance and "\\" not in instance:  # else it is escaped, and %I undoes that
        found["I"] = instance
    return found
