"""Rank truth where a server only has arguments and its own account of its settings."""

from __future__ import annotations

from typing import Any

import pytest

from monitors.engines import load
from opsctl.rollout import truth
from opsctl.rollout.checks import Outcome
from opsctl.rollout.target import Member, Target
from opsctl.service.embedded import EmbeddedService

SGLANG = {"model_path": "/m", "grammar_backend": "none", "tp_size": 2, "disable_overlap_schedule": True, "internal_states": [{}]}


def group(tmp_path: Any, engine: str) -> Target:
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text("argv = ['x']\n")
    members = [Member(EmbeddedService(tmp_path, name, {"HOME": str(tmp_path)}), (), "") for name in ("a", "b")]
    return Target("d", engine, "http://x", "", tuple(members))


@pytest.mark.parametrize(
    ("engine", "told", "argv", "outcome", "says"),
    [
        ("sglang", SGLANG, ["--grammar-backend", "none", "--tp", "2", "--disable-overlap-schedule"], Outcome.passed, "4 planned flags"),
        ("sglang", {**SGLANG, "grammar_backend": "xgrammar"}, ["--grammar-backend", "none"], Outcome.failed, "the server has 'xgrammar'"),
        ("sglang", {"model_path": "/m"}, ["--grammar-backend", "none"], Outcome.inconclusive, "does not tell its --grammar-backend"),
        ("sglang", None, ["--grammar-backend", "none"], Outcome.inconclusive, "/get_server_info"),
        ("vllm", None, ["--grammar-backend", "none"], Outcome.passed, "tells no more"),
        ("vllm", {"vllm_config": {"model_config": {"model": "/n"}}}, [], Outcome.failed, "the server has '/n'"),
    ],
)
def test_a_servers_own_account_must_agree_with_the_plan_and_silence_is_no_agreement(
    tmp_path: Any, engine: str, told: dict[str, Any] | None, argv: list[str], outcome: Outcome, says: str
) -> None:
    planned = {name: ["python", "--model", "/m", *argv] for name in ("a", "b")}
    changed = frozenset(["grammar-backend"]) if argv else frozenset(["model"])
    found = truth.of_arguments(group(tmp_path, engine), planned, changed, load(engine).config, lambda: told)
    assert found.outcome is outcome and says in found.evidence, found


def test_nodes_that_would_run_different_flags_are_no_group(tmp_path: Any) -> None:
    planned = {"a": ["x", "--grammar-backend", "none"], "b": ["x"]}
    found = truth.of_arguments(group(tmp_path, "vllm"), planned, frozenset(["grammar-backend"]), load("vllm").config, lambda: None)
    assert found.outcome is Outcome.failed and "--grammar-backend" in found.evidence
