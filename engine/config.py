"""The settings: one frozen tree, which ``engine/flags.py`` fills from the command line and validates once.

Two kinds of settings live here. *Declared* ones say what the deployment is meant to be; their canonical JSON makes
the configuration digest that ``/server_info``, the black box and ``system_fingerprint`` carry. *Local* ones say
where this process runs (rank, port, run directory, keys, armed faults) and stay out of the digest, so that a planner
can predict the digest of a deployment without knowing on which port or node it will run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
            for group, options in groups()
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


def groups() -> Iterator[tuple[str, tuple[dataclasses.Field[Any], ...]]]:
    """Each group of the tree with its settings."""
    for group in dataclasses.fields(Settings):
        yield group.name, dataclasses.fields(group.default_factory)  # type: ignore[arg-type]


def run_directory(s: Settings, env: Mapping[str, str] | None = None) -> Path:
    """Where black boxes and sockets live: ``--run-dir``, ``$RUNTIME_DIRECTORY``, or the user's runtime folder."""
    env = os.environ if env is None else env
    if s.launch.run_dir:
        return Path(s.launch.run_dir)
    if env.get("RUNTIME_DIRECTORY"):
        return Path(env["RUNTIME_DIRECTORY"].split(":")[0])
    base = env.get("XDG_RUNTIME_DIR") or f"/tmp/lastbatch-{os.getuid()}"
    return Path(base) / ("lastbatch" if env.get("XDG_RUNTIME_DIR") else "") / s.launch.name
