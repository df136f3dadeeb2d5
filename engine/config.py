"""The settings: one frozen tree, filled from the command line, validated once, with errors that name the flag.

Two kinds of settings live here. *Declared* ones say what the deployment is meant to be; their canonical JSON makes
the configuration digest that ``/server_info``, the black box and ``system_fingerprint`` carry. *Local* ones say
where this process runs (rank, port, run directory, keys, armed faults) and stay out of the digest, so that a planner
can predict the digest of a deployment without knowing on which port or node it will run.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from engine.unknown_flags import refusal

_T = TypeVar("_T")

CPU_POOL_TOKENS = 32768
"""The KV pool on a CPU where no flag says otherwise."""


class ConfigError(ValueError):
    """A setting that cannot be used. The text names the flag, what was wrong and what would do."""


def _flag(default: _T, name: str, text: str, *, aliases: Sequence[str] = (), choices: Sequence[str] | None = None,
          local: bool = False, unit: str = "", repeat: bool = False) -> _T:  # fmt: skip
    meta = {"flag": name, "aliases": tuple(aliases), "help": text, "choices": choices, "local": local, "unit": unit, "repeat": repeat}
    value: Any = field(default=default, metadata=meta)
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ModelSettings:
    path: str = _flag(
        "", "--model", "Hugging Face folder to serve; empty: the default model of `lastbatch model fetch`", aliases=("--model-path",)
    )
    served_name: str = _flag("", "--served-model-name", "name in /v1/models and in answers; empty: the folder's name")
    dtype: str = _flag("auto", "--dtype", "type of weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = _flag("auto", "--device", "where the model runs", choices=("auto", "cpu", "cuda"))
    context_length: int = _flag(0, "--context-length", "longest prompt and answer together; 0: the model's own", unit="tokens")
    chat_template: str = _flag("", "--chat-template", "Jinja file that replaces the model's chat template")
    tool_call_parser: str = _flag(
        "hermes",
        "--tool-call-parser",
        "how tool calls are written by the model. A chat template that has no place for tools gets them in the system message, in Hermes's "
        "form, with earlier calls in the assistant's text and tools' answers in a user's turn",
        choices=("hermes", "none"),
    )
    reasoning_parser: str = _flag("none", "--reasoning-parser", "how reasoning is marked by the model", choices=("think", "none"))
    sampling_defaults: str = _flag(
        "model",
        "--sampling-defaults",
        "what a request gets that does not set temperature, top_p, top_k, min_p or repetition_penalty: model, what generation_config.json "
        "recommends; openai, temperature 1 and every token",
        choices=("model", "openai"),
    )
    random_seed: int = _flag(0, "--random-seed", "seed from which requests without a seed of their own draw one; 0: the clock")


@dataclass(frozen=True)
class ParallelSettings:
    tp: int = _flag(1, "--tp", "tensor-parallel ranks", aliases=("--tp-size", "--tensor-parallel-size"))
    nnodes: int = _flag(1, "--nnodes", "nodes that share the ranks, the first ones taking what does not divide")
    node_rank: int = _flag(0, "--node-rank", "which of the nodes this is; 0 serves HTTP", local=True)
    dist_init_addr: str = _flag(
        "", "--dist-init-addr", "HOST:PORT of node 0 for the rendezvous; the next three ports are used too", local=True
    )
    group_token_file: str = _flag(
        "", "--group-token-file", "file with a secret that all nodes of a group share: nobody else is let into it", local=True
    )
    threads_per_rank: int = _flag(0, "--threads-per-rank", "compute threads of a rank on a CPU; 0: cores divided by local ranks")
    rendezvous_timeout_s: float = _flag(300.0, "--rendezvous-timeout", "how long ranks wait for each other at start", unit="s")


@dataclass(frozen=True)
class SchedulerSettings:
    max_running_requests: int = _flag(32, "--max-running-requests", "most requests in a batch")
    max_queued_requests: int = _flag(512, "--max-queued-requests", "requests that may wait; more are refused with 503 and Retry-After")
    chunked_prefill_size: int = _flag(
        1024, "--chunked-prefill-size", "most prompt tokens in one prefill step; -1: whole prompts", unit="tokens"
    )
    enable_overlap_schedule: bool = _flag(
        False, "--enable-overlap-schedule", "prepare each batch while the last one is computed: the default on CUDA, slower on a CPU"
    )
    disable_overlap_schedule: bool = _flag(
        False, "--disable-overlap-schedule", "prepare each batch only after the last one's results; wins over --enable-overlap-schedule"
    )
    decode_log_interval: int = _flag(
        40, "--decode-log-interval", "decode steps between batch lines (a line also comes every 2 s)", unit="steps"
    )


@dataclass(frozen=True)
class CacheSettings:
    page_size: int = _flag(16, "--page-size", "tokens in a KV page", unit="tokens")
    max_total_tokens: int = _flag(
        0,
        "--max-total-tokens",
        f"tokens in the KV pool; 0: on CUDA what --mem-fraction-static leaves, on a CPU {CPU_POOL_TOKENS}, so that one deployment has one "
        "pool on every machine and leaves memory to its neighbours (less where all running requests cannot fill it)",
        unit="tokens",
    )
    mem_fraction: float = _flag(
        0.0,
        "--mem-fraction-static",
        "share of memory for weights and KV pool; 0: 0.85 on CUDA; on a CPU, where it is a share of all the machine's memory, none",
    )
    disable_radix_cache: bool = _flag(False, "--disable-radix-cache", "do not reuse the KV of common prefixes")


@dataclass(frozen=True)
class SpeculationSettings:
    algorithm: str = _flag("NONE", "--speculative-algorithm", "drafter", choices=("NONE", "NGRAM"))
    num_draft_tokens: int = _flag(4, "--speculative-num-draft-tokens", "most tokens drafted a step", unit="tokens")
    ngram_min: int = _flag(2, "--speculative-ngram-min-match", "shortest suffix that is looked up in the text so far", unit="tokens")
    ngram_max: int = _flag(5, "--speculative-ngram-max-match", "longest suffix that is looked up", unit="tokens")


@dataclass(frozen=True)
class GrammarSettings:
    backend: str = _flag(
        "xgrammar", "--grammar-backend", "constrained decoding; none refuses it at admission", choices=("xgrammar", "none")
    )
    compile_timeout_s: float = _flag(10.0, "--grammar-compile-timeout", "a grammar that takes longer to compile is refused", unit="s")
    step_budget_ms: float = _flag(
        10.0, "--grammar-step-budget", "CPU time that one request's grammar may take a step; one that stays above it ends", unit="ms"
    )
    max_whitespace: int = _flag(4, "--grammar-max-whitespace", "most white space between two JSON tokens; 0: none", unit="characters")


@dataclass(frozen=True)
class ServerSettings:
    host: str = _flag("127.0.0.1", "--host", "address to listen on", local=True)
    port: int = _flag(30000, "--port", "port to listen on", local=True)
    api_key_file: str = _flag("", "--api-key-file", "file with the key that clients must send; also LASTBATCH_API_KEY", local=True)
    admin_key_file: str = _flag("", "--admin-key-file", "file with the key for /admin; also LASTBATCH_ADMIN_KEY", local=True)
    health_generate_timeout_s: float = _flag(20.0, "--health-generate-timeout", "deadline of /health_generate", unit="s")
    health_max_age_s: float = _flag(20.0, "--health-max-age", "/health_scheduler is 503 when a rank's record is older", unit="s")
    drain_timeout_s: float = _flag(30.0, "--drain-timeout", "how long running requests may finish after SIGTERM", unit="s")
    log_level: str = _flag("info", "--log-level", "least level that is logged", choices=("debug", "info", "warning", "error"), local=True)


@dataclass(frozen=True)
class LaunchSettings:
    watchdog_timeout_s: float = _flag(
        300.0,
        "--watchdog-timeout",
        "a rank that holds work and does not move for this long is captured, then all are killed; 0: off",
        unit="s",
    )
    boot_timeout_s: float = _flag(720.0, "--boot-timeout", "load and warm-up must end within this", unit="s")
    name: str = _flag("default", "--name", "name of the deployment in the run directory", local=True)
    run_dir: str = _flag(
        "", "--run-dir", "black boxes and sockets; empty: $RUNTIME_DIRECTORY, else $XDG_RUNTIME_DIR/lastbatch/NAME", local=True
    )
    enable_faults: bool = _flag(False, "--enable-faults", "allow fault injection (drills only)", local=True)
    fault: tuple[str, ...] = _flag((), "--fault", "NAME[:key=value,...] armed at start; needs --enable-faults", local=True, repeat=True)
    role: str = _flag("both", "--role", "what this engine serves", choices=("both",))


@dataclass(frozen=True)
class Settings:
    model: ModelSettings = field(default_factory=ModelSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    grammar: GrammarSettings = field(default_factory=GrammarSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)

    def declared(self) -> dict[str, dict[str, Any]]:
        """The settings that make the digest, as ``{group: {name: value}}``."""
        return {
            group: {f.name: getattr(getattr(self, group), f.name) for f in options if not f.metadata["local"]}
            for group, options in _groups()
        }

    def declared_json(self) -> str:
        return json.dumps(self.declared(), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """The first 32 hex digits of the SHA-256 of the declared settings' canonical JSON."""
        return hashlib.sha256(self.declared_json().encode()).hexdigest()[:32]

    def overlaps(self, device_kind: str) -> bool:
        """Which loop runs on ``cpu`` or ``cuda``. On a CPU the loop's own work takes cores from the model's threads,
        so what overlap hides costs more than it saves (``make bench``, part ``loops``)."""
        if self.scheduler.disable_overlap_schedule:
            return False
        return self.scheduler.enable_overlap_schedule or device_kind == "cuda"

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Global ranks that run on this node."""
        return tuple(rank for rank in range(self.parallel.tp) if self.node_of(rank) == self.parallel.node_rank)

    def node_of(self, rank: int) -> int:
        """The node of a rank: consecutive ranks share a node, and the first nodes take what does not divide."""
        each, more = divmod(self.parallel.tp, self.parallel.nnodes)
        return rank // (each + 1) if rank < more * (each + 1) else more + (rank - more * (each + 1)) // each

    def to_json(self) -> str:
        """Everything, local settings too: how a parent hands its settings to the processes it starts."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Settings:
        raw: Mapping[str, Any] = json.loads(text)
        types = {f.name: f.default_factory for f in dataclasses.fields(Settings)}
        built: dict[str, Any] = {}
        for group, values in raw.items():
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            built[group] = types[group](**values)  # type: ignore[operator]
        return Settings(**built)


def _groups() -> Iterator[tuple[str, tuple[dataclasses.Field[Any], ...]]]:
    for group in dataclasses.fields(Settings):
        yield group.name, dataclasses.fields(group.default_factory)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Option:
    """One flag as the reference page shows it."""

    group: str
    name: str
    flag: str
    aliases: tuple[str, ...]
    default: Any
    unit: str
    choices: tuple[str, ...]
    help: str
    declared: bool
    repeat: bool


def options() -> list[Option]:
    """Every flag of ``lastbatch serve``, in the order of the tree."""
    return [
        Option(group, f.name, f.metadata["flag"], f.metadata["aliases"], f.default, f.metadata["unit"],
               tuple(f.metadata["choices"] or ()), f.metadata["help"], not f.metadata["local"], f.metadata["repeat"])
        for group, options_ in _groups() for f in options_
    ]  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser(prog: str = "lastbatch serve") -> argparse.ArgumentParser:
    made = _Parser(prog=prog, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sections = {group: made.add_argument_group(group) for group, _ in _groups()}
    for option in options():
        target = f"{option.group}.{option.name}"
        note = option.help + (f" [{option.unit}]" if option.unit else "")
        names = (option.flag, *option.aliases)
        if isinstance(option.default, bool):
            sections[option.group].add_argument(*names, dest=target, action="store_true", help=note)
        elif option.repeat:
            sections[option.group].add_argument(*names, dest=target, action="append", default=[], metavar="SPEC", help=note)
        else:
            sections[option.group].add_argument(*names, dest=target, type=type(option.default), default=option.default,
                                                choices=option.choices or None, help=note,
                                                metavar=None if option.choices else type(option.default).__name__.upper())  # fmt: skip
    return made


def parse(args: Sequence[str]) -> Settings:
    """Settings from the arguments of ``lastbatch serve``.

    Raises:
        ConfigError: an unknown flag, a value of the wrong kind or a combination that cannot work.
    """
    namespace, left = parser().parse_known_args(list(args))
    if left:
        raise ConfigError(refusal(left, (name for option in options() for name in (option.flag, *option.aliases))))
    found = vars(namespace)
    tree: dict[str, dict[str, Any]] = {}
    for target, value in found.items():
        group, name = target.split(".", 1)
        tree.setdefault(group, {})[name] = tuple(value) if isinstance(value, list) else value
    types = {f.name: f.default_factory for f in dataclasses.fields(Settings)}
    settings = Settings(**{group: types[group](**values) for group, values in tree.items()})  # type: ignore[operator]
    validate(settings)
    return settings


def validate(s: Settings) -> None:
    """Refuse what cannot work, whatever the model. What depends on the model is checked by ``fit_model``."""

    def need(good: bool, text: str) -> None:
        if not good:
            raise ConfigError(text)

    for flag, value in (("--tp", s.parallel.tp), ("--nnodes", s.parallel.nnodes), ("--page-size", s.cache.page_size),
                        ("--max-running-requests", s.scheduler.max_running_requests),
                        ("--max-queued-requests", s.scheduler.max_queued_requests),
                        ("--decode-log-interval", s.scheduler.decode_log_interval),
                        ("--speculative-num-draft-tokens", s.speculation.num_draft_tokens),
                        ("--speculative-ngram-min-match", s.speculation.ngram_min)):  # fmt: skip
        need(value >= 1, f"{flag}: {value} is less than 1")
    for flag, seconds in (("--rendezvous-timeout", s.parallel.rendezvous_timeout_s),
                          ("--grammar-compile-timeout", s.grammar.compile_timeout_s),
                          ("--grammar-step-budget", s.grammar.step_budget_ms / 1000),
                          ("--health-generate-timeout", s.server.health_generate_timeout_s),
                          ("--health-max-age", s.server.health_max_age_s),
                          ("--boot-timeout", s.launch.boot_timeout_s)):  # fmt: skip
        need(seconds > 0, f"{flag}: {seconds} s is not a time; give a number above 0")
    for flag, value in (("--context-length", s.model.context_length), ("--max-total-tokens", s.cache.max_total_tokens),
                        ("--threads-per-rank", s.parallel.threads_per_rank),
                        ("--grammar-max-whitespace", s.grammar.max_whitespace)):  # fmt: skip
        need(value >= 0, f"{flag}: {value} is negative")
    need(s.model.context_length != 1, "--context-length: 1 token cannot hold a prompt and an answer; 0: the model's own")
    need(s.launch.watchdog_timeout_s >= 0, f"--watchdog-timeout: {s.launch.watchdog_timeout_s} is negative; 0 turns it off")
    need(s.server.drain_timeout_s >= 0, f"--drain-timeout: {s.server.drain_timeout_s} is negative")
    need(
        s.parallel.tp >= s.parallel.nnodes,
        f"--nnodes: {s.parallel.nnodes} nodes for {s.parallel.tp} ranks: give --tp {s.parallel.nnodes} or more",
    )
    need(0 <= s.parallel.node_rank < s.parallel.nnodes, f"--node-rank: {s.parallel.node_rank} is not in 0..{s.parallel.nnodes - 1}")
    if s.parallel.nnodes > 1:
        host, _, port = s.parallel.dist_init_addr.rpartition(":")
        need(bool(host) and port.isdecimal() and 0 < int(port) < 65533,
             f"--dist-init-addr: {s.parallel.dist_init_addr!r} is not HOST:PORT of node 0 (PORT up to 65532), "
             "which --nnodes above 1 needs")  # fmt: skip
    chunk = s.scheduler.chunked_prefill_size
    need(
        chunk == -1 or chunk >= s.cache.page_size,
        f"--chunked-prefill-size: {chunk} is below --page-size {s.cache.page_size}; -1 turns chunking off",
    )
    need(0 <= s.cache.mem_fraction < 1, f"--mem-fraction-static: {s.cache.mem_fraction} is not in 0..1")
    need(s.speculation.ngram_max >= s.speculation.ngram_min,
         f"--speculative-ngram-max-match: {s.speculation.ngram_max} is below "
         f"--speculative-ngram-min-match {s.speculation.ngram_min}")  # fmt: skip
    need(0 <= s.server.port < 65536, f"--port: {s.server.port} is not in 0..65535")
    need(not s.launch.fault or s.launch.enable_faults, "--fault: needs --enable-faults")
    for flag, path in (
        ("--chat-template", s.model.chat_template),
        ("--api-key-file", s.server.api_key_file),
        ("--admin-key-file", s.server.admin_key_file),
        ("--group-token-file", s.parallel.group_token_file),
    ):
        need(not path or Path(path).is_file(), f"{flag}: {path}: no such file")


def fit_model(s: Settings, *, heads: int, kv_heads: int, intermediate: int, vocab: int, context: int) -> None:
    """Refuse settings that this model cannot take. Raises ConfigError."""
    tp = s.parallel.tp

    def fits(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0) and intermediate % n == 0

    if not fits(tp):
        good = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
        raise ConfigError(f"--tp: {tp} does not divide the model's {heads} query and {kv_heads} key/value heads "
                          f"(intermediate size {intermediate}); these would: {good}")  # fmt: skip
    if s.model.context_length > context:
        raise ConfigError(f"--context-length: {s.model.context_length} is more than the model's {context} tokens")
    if s.cache.max_total_tokens and s.cache.max_total_tokens < 2 * s.cache.page_size:
        raise ConfigError(f"--max-total-tokens: {s.cache.max_total_tokens} is less than two pages of {s.cache.page_size}")


def run_directory(s: Settings, env: Mapping[str, str] | None = None) -> Path:
    """Where black boxes and sockets live: ``--run-dir``, ``$RUNTIME_DIRECTORY``, or the user's runtime folder."""
    env = os.environ if env is None else env
    if s.launch.run_dir:
        return Path(s.launch.run_dir)
    if env.get("RUNTIME_DIRECTORY"):
        return Path(env["RUNTIME_DIRECTORY"].split(":")[0])
    base = env.get("XDG_RUNTIME_DIR") or f"/tmp/lastbatch-{os.getuid()}"
    return Path(base) / ("lastbatch" if env.get("XDG_RUNTIME_DIR") else "") / s.launch.name
