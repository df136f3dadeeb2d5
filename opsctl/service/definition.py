"""The file that describes an embedded service: ``NAME.toml`` in a services folder.

::

    argv = ["/opt/lastbatch/bin/lastbatch", "serve", "--port", "30000"]
    env = { OMP_NUM_THREADS = "1" }
    cwd = "/srv/flash"
    notify = true        # ready when the command says READY=1; false: as soon as it runs
    start_s = 720        # not ready by then: killed (EXTEND_TIMEOUT_USEC moves it)
    stop_s = 45          # after SIGTERM, then SIGKILL to whatever is left of the tree
    restart_s = 1        # before a restart after a failure; doubles up to restart_max_s while it keeps failing
    watchdog_s = 0       # WATCHDOG=1 must come at least this often; 0: off
    run_dir = "/run/user/1000/lastbatch/flash"
    log = "/var/log/flash.log"

Paths may be relative to the folder of the file. Only ``argv`` is needed.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from opsctl.service.manager import ServiceError


class Definition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    argv: list[str]
    name: str = ""
    env: dict[str, str] = {}
    cwd: str = ""
    notify: bool = True
    start_s: float = 720.0
    stop_s: float = 45.0
    restart_s: float = 1.0
    restart_max_s: float = 30.0
    restart: bool = True
    watchdog_s: float = 0.0
    run_dir: str = ""
    log: str = ""


def services_folder(env: Mapping[str, str]) -> Path:
    """``$OPSCTL_SERVICES``, else the user's configuration folder."""
    if env.get("OPSCTL_SERVICES"):
        return Path(env["OPSCTL_SERVICES"])
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "opsctl" / "services"


def runtime_folder(name: str, env: Mapping[str, str]) -> Path:
    """Where a service's sockets, state and black boxes live when its definition does not say; gone at reboot."""
    base = env.get("XDG_RUNTIME_DIR")
    return (Path(base) / "lastbatch" if base else Path(f"/tmp/lastbatch-{os.getuid()}")) / name


def read(folder: Path, name: str, env: Mapping[str, str]) -> Definition:
    """The definition of a service, its paths made absolute and its defaults filled in.

    Raises:
        ServiceError: no such file, or one that cannot be used; the text names the file and the key.
    """
    path = folder / f"{name}.toml"
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = sorted(p.stem for p in folder.glob("*.toml")) if folder.is_dir() else []
        raise ServiceError(f"{path}: no such service; this folder has {', '.join(known) or 'none'}") from None
    except (OSError, ValueError) as error:
        raise ServiceError(f"{path}: {error}") from error
    try:
        found = msgspec.convert(raw, Definition)
    except msgspec.ValidationError as error:
        raise ServiceError(f"{path}: {error}") from error
    return complete(found, folder, name, env)


def complete(found: Definition, folder: Path, name: str, env: Mapping[str, str]) -> Definition:
    """A definition with its paths made absolute and its defaults filled in. Raises ServiceError when it cannot be used."""
    path = folder / f"{name}.toml"
    if not found.argv:
        raise ServiceError(f"{path}: argv: empty; give the command to run")
    if found.name and found.name != name:
        raise ServiceError(f"{path}: name: {found.name!r} is not the file's name; leave it out or rename the file")
    for key in ("start_s", "stop_s", "restart_s"):
        if getattr(found, key) <= 0:
            raise ServiceError(f"{path}: {key}: {getattr(found, key)} is not a time; give seconds above 0")
    run_dir = folder.absolute() / found.run_dir if found.run_dir else runtime_folder(name, env)
    return msgspec.structs.replace(
        found, name=name, run_dir=str(run_dir), cwd=str(folder.absolute() / found.cwd),
        log=str(folder.absolute() / found.log if found.log else run_dir / "service.log"),
    )  # fmt: skip


def write(path: Path, service: Definition) -> None:
    """Put a definition at ``path`` as TOML, whole or not at all; one that says the same is left alone."""
    lines = ["# Written by opsctl from the fleet file, which is where to change it."]
    for key in service.__struct_fields__:
        value = getattr(service, key)
        if key != "name":
            lines.append(f"{key} = {_toml(value)}")
    text = "\n".join(lines) + "\n"
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.rename(path)


def _toml(value: object) -> str:
    """A JSON string, number, boolean or list is TOML too."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    return msgspec.json.encode(value).decode()
