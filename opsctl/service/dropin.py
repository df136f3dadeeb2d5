"""A drop-in that replaces a unit's command line, as text.

systemd strips quotes even inside a word, expands ``%`` and ``$`` and knows C escapes, so each argument is quoted and
escaped whole; ``systemd-analyze verify`` would not notice a mistake. The file carries what it means as JSON in a
comment, so that it is read back exactly and an edit by others is noticed.
"""

from __future__ import annotations

import json
import re

from opsctl.service.manager import Override, ServiceError, UnitFile

COMMITTED = "zz-opsctl-50.conf"
TRIAL = "zz-opsctl-90-trial.conf"
_MARK = "# opsctl: "
_EXPANDS = re.compile(r"\$(?:\{|[A-Za-z_])")


def quote(argument: str, *, expands: bool = True) -> str:
    """One argument of ``ExecStart=``; with ``expands=False`` of ``Environment=``, where ``$`` means itself."""
    text = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    text = text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return f'"{text.replace("$", "$$") if expands else text}"'


def bind(path: str) -> str:
    """One side of ``BindReadOnlyPaths=``, where a colon parts the sides. Raises ServiceError for a path with one."""
    if ":" in path or not path.startswith("/"):
        raise ServiceError(f"{path!r}: a path to mount must be absolute and hold no colon")
    return quote(path, expands=False)[1:-1].replace(" ", "\\x20")


def unescape(argument: str, where: str) -> str:
    """An argument as the bus shows it, where all is decoded but the dollars.

    Raises ServiceError for one that systemd expands at the start: what it becomes is not known before.
    """
    if _EXPANDS.search(argument.replace("$$", "")):
        raise ServiceError(f"{where}: ExecStart has {argument!r}, which is only known once it runs; write the value itself into the unit")
    return argument.replace("$$", "$")


def render(override: Override) -> str:
    """Raises ServiceError for an argument that systemd cannot carry."""
    for argument in (*override.argv, *override.env, *override.env.values(), *override.mounts, *override.mounts.values()):
        if "\0" in argument:
            raise ServiceError(f"{argument!r}: holds a NUL, which no argument can")
    env = dict(sorted(override.env.items()))
    meaning: dict[str, object] = {"argv": list(override.argv), "env": env}
    if override.mounts:
        meaning["mounts"] = dict(sorted(override.mounts.items()))
    if override.unit:
        meaning["unit"] = {"name": override.unit.name, "was": override.unit.was}
    lines = [
        "# Written by opsctl, which removes it too: `opsctl rollout status`. Do not edit: an edit stops the next rollout.",
        _MARK + json.dumps(meaning),
        "[Service]",
        "ExecStart=",
        "ExecStart=" + " ".join(quote(argument) for argument in override.argv),
    ]
    lines += [f"Environment={quote(f'{key}={value}', expands=False)}" for key, value in env.items()]
    lines += [f"BindReadOnlyPaths={bind(source)}:{bind(target)}" for target, source in sorted(override.mounts.items())]
    return "\n".join(lines) + "\n"


def parse(text: str, where: str) -> Override:
    """What a drop-in of ours says. Raises ServiceError when it is not as we wrote it."""
    for line in text.splitlines():
        if line.startswith(_MARK):
            try:
                found = json.loads(line.removeprefix(_MARK))
                unit = UnitFile(**found["unit"]) if "unit" in found else None
                override = Override(tuple(found["argv"]), found["env"], found.get("mounts", {}), unit)
            except (ValueError, KeyError, TypeError):
                break
            if render(override) == text:
                return override
            break
    raise ServiceError(f"{where}: was changed by hand since opsctl wrote it; move what it says into the unit itself and delete it")
