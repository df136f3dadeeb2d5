"""The fleet file: deployments, their nodes and services, their callers, and who is paged.

The file is TOML and is validated in one go. Every problem names the file, the key path and, where there is one, the
likely intent, so that a typo is found before an incident and not in it.
"""

from __future__ import annotations

import datetime
import difflib
import os
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

Role = Literal["prefill", "decode", "both", "router"]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
_UNIT_SUFFIXES = (".service", ".scope")


class FleetError(ValueError):
    """The fleet file cannot be used. ``problems`` holds one line each: ``FILE: KEY.PATH: what; what to do``."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Service(_Table):
    """One process tree on a node: a systemd unit, or a service of the embedded supervisor."""

    unit: str  # its name with the suffix, such as flash.service; for the embedded supervisor without one
    role: Role = "both"  # what it does of a request
    ranks: tuple[int, ...] = ()  # the global ranks that it runs
    log: str = "journal"  # "journal", or the path of a file
    container: str = ""  # set where the unit runs one
    run_dir: str = ""  # where the black boxes are; empty: /run/<RuntimeDirectory> of the unit
    command: tuple[str, ...] = ()  # embedded supervisor: what it starts, without the changeable arguments
    args: tuple[str, ...] = ()  # embedded supervisor: the arguments that a rollout may change
    env: dict[str, str] = Field(default_factory=dict)  # embedded supervisor: added to the environment
    cwd: str = ""  # embedded supervisor: working folder


class Node(_Table):
    """A machine. ``ssh`` is what follows the word ssh (options and destination); empty is this machine."""

    name: _Name
    ssh: str = ""  # what follows the word ssh; empty: this machine
    replica: str = ""  # nodes that share this word are one group that serves by itself; empty: all nodes are one group
    api: str = ""  # the group's own API where there are several; empty: the deployment's
    python: str = ""  # interpreter for the collector; empty: this one here, python3 elsewhere
    py_spy: str = ""  # empty: beside the interpreter, else on PATH
    drain: tuple[str, ...] = ()  # a command there that takes its group out of the router and returns when no request is left
    undrain: tuple[str, ...] = ()  # and one that puts it back; both may be run twice
    drain_s: float = Field(default=60.0, gt=0)  # what either may take
    service: tuple[Service, ...] = ()


def answer_class(value: str) -> str:
    """``value`` if it names a class of answers that a caller may be promised. Raises ValueError."""
    word, _, code = value.partition(" ")
    if value in ("text", "json", "tool_call") or (word == "http" and code.isdigit() and len(code) == 3):
        return value
    raise ValueError(f'"{value}" is no expectation; use "text", "json", "tool_call" or "http 400"')


class ExpectChange(_Table):
    """A change of a caller's answers that is agreed to. Somebody is paged when ``review_by`` is past: by then the client
    should have been changed, or the server back."""

    to: Annotated[str, AfterValidator(answer_class)]
    review_by: datetime.date


class Caller(_Table):
    """What one kind of client sends. A rollout compares the answers before and after."""

    name: _Name
    request: dict[str, Any]
    expect: Annotated[str, AfterValidator(answer_class)] = "text"  # text | json | tool_call | "http 400"
    expect_change: ExpectChange | None = None
    probe: Literal["live", "never-live"] = "live"
    via: str = ""  # the client's own path (a gateway), as the client's base URL; empty: the deployment's api
    api_key_file: str = ""  # the client's own key: it is sent through ``via``, and its hash names the client in the log
    user_agent: str = ""  # where the client sends no key: what names it in the log
    remedy: str = ""  # how its people change it: shown when a rollout changes its answers


class OnWedge(_Table):
    """What follows the page for a wedge that still stands. The action is the ``opsctl`` command, ended after ``deadline_s``."""

    action: Literal["page", "playbook", "restart"] = "page"
    playbook: str = ""  # its name; this key is the approval of its steps
    deadline_s: float = Field(default=1800.0, gt=0)  # the action is ended after it

    @model_validator(mode="after")
    def _playbook_is_named(self) -> OnWedge:
        if self.action == "playbook" and not self.playbook:
            raise ValueError('action = "playbook" needs the key playbook = "NAME"')
        return self


class Canary(_Table):
    """Requests of the monitor's own; each costs real tokens, so both are off (0) unless asked for. ``idle_every_s``: one
    with a nonce when nothing is held. ``load_every_s``: a seeded one beside other requests, whose answer must equal the
    one that was recorded at rest."""

    idle_every_s: float = Field(default=0.0, ge=0)
    load_every_s: float = Field(default=0.0, ge=0)
    deadline_s: float = Field(default=60.0, gt=0)


class Deployment(_Table):
    """One served model: its API, its nodes, its times."""

    name: str = ""  # filled with the table's key
    engine: str  # the dialect: lastbatch, sglang, vllm or generic
    api: str  # base URL of the API, without /v1
    service: Literal["systemd", "systemd-user", "embedded"] = "systemd"  # who runs its services
    watchdog_s: float = Field(default=0.0, ge=0)  # 0: the dialect's default
    allow_faults: bool = False  # drills may arm faults here
    api_key_file: str = ""  # a file with the key that clients send
    admin_key_file: str = ""  # a file with the key for /admin
    on_wedge: OnWedge = OnWedge()
    bundle_dir: str = ""  # where evidence goes; empty: $STATE_DIRECTORY, else the user's state folder
    boot_deadline_s: float = Field(default=720.0, gt=0)  # a start that is not ready by then has failed
    stable_s: float = Field(default=60.0, ge=0)  # how long a change must hold before it is committed
    hold_s: float = Field(default=3600.0, gt=0)  # how long a held rollout waits for a person
    node: tuple[Node, ...]
    caller: tuple[Caller, ...] = ()
    throughput_allowance_pct: float | None = Field(default=None, ge=0, lt=100)  # a rollout may cost so much; unset: not measured
    drift_share: float | None = Field(default=None, ge=0, le=1)  # of a greedy answer that must stay; unset: all in f32, else half
    canary: Canary = Canary()

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        from monitors.engines import names

        if value in names():
            return value
        near = difflib.get_close_matches(value, names(), 1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'"{value}" has no dialect; known are {", ".join(names())}{hint}')

    @field_validator("api")
    @classmethod
    def _address(cls, value: str) -> str:
        if value.startswith(("http://", "https://")):
            return value.rstrip("/")
        raise ValueError(f'"{value}" is no URL; did you mean "http://{value}"?')


class Page(_Table):
    """Who is told. ``remind_s``: an open incident that nobody has acknowledged is paged again so often (0: never)."""

    urls: tuple[str, ...] = ()  # any URL that apprise knows
    remind_s: float = Field(default=0.0, ge=0)
    recovery: bool = True  # tell when a paged incident is over


class Capture(_Table):
    """How evidence is kept."""

    keep: int = Field(default=50, ge=1)  # bundles of one deployment
    keep_bytes: int = Field(default=10 << 30, ge=1 << 20)
    most_per_hour: int = Field(default=12, ge=1)  # above it a capture takes no stacks: ptrace is not free
    archive: bool = True  # also as .tar.zst
    upload: tuple[str, ...] = ()  # a command; {bundle} is the archive, {id} the bundle's name
    upload_deadline_s: float = Field(default=120.0, gt=0)
    redact_ip: bool = False
    cuda_core_dump: bool = False  # trigger a device core dump where the driver was told to offer one


class Heartbeat(_Table):
    """A URL that is fetched while the monitor works, so that a monitor that died is noticed by somebody else."""

    url: str = ""
    every_s: float = Field(default=60.0, ge=1)


class Fleet(_Table):
    deployment: dict[_Name, Deployment]
    page: Page = Page()
    capture: Capture = Capture()
    heartbeat: Heartbeat = Heartbeat()
    path: str = ""

    def one(self, name: str = "") -> Deployment:
        """The named deployment, or the only one. Raises FleetError when that is no or several."""
        if name in self.deployment:
            return self.deployment[name]
        known = ", ".join(sorted(self.deployment))
        if name:
            near = difflib.get_close_matches(name, self.deployment, 1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise FleetError([f"{self.path}: deployment.{name}: not in the file, which has {known}{hint}"])
        if len(self.deployment) == 1:
            return next(iter(self.deployment.values()))
        raise FleetError([f"{self.path}: deployment: the file has {known}; say which with --deployment"])


def load(path: Path | str) -> Fleet:
    """Read and validate a fleet file. Raises FleetError with every problem found."""
    where = Path(path)
    try:
        text = where.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "; give it with --fleet FILE, or go to where it lies" if isinstance(error, FileNotFoundError) else ""
        raise FleetError([f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}{remedy}"]) from error
    return parse(text, str(where))


def parse(text: str, source: str) -> Fleet:
    """The fleet of a TOML text. ``source`` is what errors call the file. Raises FleetError."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FleetError([f"{source}: not valid TOML: {error}"]) from error
    if isinstance(raw.get("deployment"), dict):
        for name, table in raw["deployment"].items():
            if isinstance(table, dict):
                table.setdefault("name", name)
    try:
        fleet = Fleet.model_validate({**raw, "path": source})
    except ValidationError as error:
        raise FleetError([f"{source}: {_problem(raw, item)}" for item in error.errors()]) from error
    problems = [f"{source}: {line}" for deployment in fleet.deployment.values() for line in _contradictions(deployment)]
    if problems:
        raise FleetError(problems)
    return fleet


def _contradictions(deployment: Deployment) -> list[str]:
    """What no single key shows: names and ranks that occur twice, units without a suffix, services without a log."""
    found: list[str] = []
    nodes: dict[str, int] = {}
    apis: dict[str, str] = {}
    ranks: dict[tuple[str, int], str] = {}
    at = f"deployment.{deployment.name}"
    if not deployment.node:
        found.append(f"{at}.node: no node; add a [[{at}.node]] table")
    for i, node in enumerate(deployment.node):
        if node.name in nodes:
            found.append(f'{at}.node[{i}].name: "{node.name}" is also the name of node[{nodes[node.name]}]')
        nodes[node.name] = i
        if bool(node.drain) != bool(node.undrain):
            has, lacks = ("drain", "undrain") if node.drain else ("undrain", "drain")
            found.append(f"{at}.node[{i}].{has}: without {lacks}; what is taken out of a router must be put back, so give both")
        api = apis.setdefault(node.replica, node.api)
        if node.api != api:
            found.append(f'{at}.node[{i}].api: "{node.api}", but replica "{node.replica}" has "{api}" above; a group has one')
        for j, service in enumerate(node.service):
            here = f"{at}.node[{i}].service[{j}]"
            if deployment.service != "embedded" and not service.unit.endswith(_UNIT_SUFFIXES):
                found.append(f'{here}.unit: "{service.unit}" has no suffix; did you mean "{service.unit}.service"?')
            if deployment.service == "embedded" and service.log == "journal":
                found.append(f"{here}.log: the embedded supervisor has no journal; give the path of its log file")
            for rank in service.ranks:
                if (node.replica, rank) in ranks:
                    found.append(f"{here}.ranks: rank {rank} is also in {ranks[node.replica, rank]}")
                ranks[node.replica, rank] = here
    callers: dict[str, int] = {}
    for i, caller in enumerate(deployment.caller):
        if caller.name in callers:
            found.append(f'{at}.caller[{i}].name: "{caller.name}" is also the name of caller[{callers[caller.name]}]')
        callers[caller.name] = i
        if not isinstance(caller.request.get("messages"), list) and not isinstance(caller.request.get("prompt"), str):
            found.append(f"{at}.caller[{i}].request: has neither messages nor a prompt; give the body that the client sends")
    return found


def _problem(raw: Mapping[str, Any], item: Any) -> str:
    path = _path(item["loc"])
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), _known_keys(item["loc"][:-1]), 1)
        return f"{path}: unknown key" + (f'; did you mean "{near[0]}"?' if near else "")
    if item["type"] == "missing":
        return f"{path}: this key is needed"
    text = item["msg"].removeprefix("Value error, ")
    return f"{path}: {text}" if item["type"] == "value_error" else f"{path}: {item['input']!r}: {text}"


def _path(parts: tuple[int | str, ...]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _known_keys(parts: tuple[int | str, ...]) -> list[str]:
    """The keys of the table that a path leads to, found by walking the models."""
    model: Any = Fleet
    free_key = False  # the next part is a name that the file's author chose (a deployment's)
    for part in parts:
        if isinstance(part, int):
            continue
        if free_key:
            free_key = False
            continue
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        free_key = typing.get_origin(annotation) is dict
        model = _element(annotation)
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return list(model.model_fields)


def _element(annotation: Any) -> Any:
    """The model inside ``tuple[Model, ...]`` or ``dict[str, Model]``; a plain annotation is itself."""
    inner = [a for a in get_args(annotation) if a is not Ellipsis]
    return _element(inner[-1]) if inner else annotation


def bundle_root(deployment: Deployment, env: Mapping[str, str] | None = None) -> Path:
    """Where bundles go: the fleet file's ``bundle_dir``, else $STATE_DIRECTORY, else the user's state folder."""
    env = os.environ if env is None else env
    if deployment.bundle_dir:
        return Path(deployment.bundle_dir)
    return state_root(env) / "bundles"


def state_root(env: Mapping[str, str] | None = None) -> Path:
    """$STATE_DIRECTORY, else the user's XDG state folder."""
    env = os.environ if env is None else env
    if env.get("STATE_DIRECTORY"):
        return Path(env["STATE_DIRECTORY"].split(":")[0])
    base = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME", "/root")) / ".local/state")
    return Path(base) / "lastbatch"
