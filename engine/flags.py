"""The command line of the settings: every flag, how a command line is read, and what is refused, by the flag's name."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.config import ConfigError, Settings, groups
from engine.unknown_flags import refusal


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
        for group, options_ in groups() for f in options_
    ]  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser(prog: str = "lastbatch serve") -> argparse.ArgumentParser:
    made = _Parser(prog=prog, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sections = {group: made.add_argument_group(group) for group, _ in groups()}
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
