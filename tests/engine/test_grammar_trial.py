"""Grammars that a compiler could not be got back from, tried in processes that the kernel ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.grammar.budget import Budgeted, GrammarTooDear
from engine.grammar.trial import TITLE
from engine.grammar.xgrammar_compiler import doubtful
from engine.messages import Grammar
from tests.e2e.serving import wait_for

SCRIPT = Path(__file__).parent / "trial_compiler.py"


def tried(deadline_s: float, *texts: str) -> subprocess.Popen[str]:
    root = SCRIPT.parents[2]
    return subprocess.Popen([sys.executable, str(SCRIPT), str(deadline_s), *texts], cwd=root, text=True, stdout=subprocess.PIPE,
                            env={**os.environ, "PYTHONPATH": str(root)})  # fmt: skip


def test_each_grammar_ends_with_its_reason_and_the_next_is_tried_all_the_same() -> None:
    with tried(0.4, "good", "bad", "for ever", "broken", "greedy", "good") as process:
        out, _ = process.communicate(timeout=60)
    found = {text: (why, spent_s) for text, why, spent_s in map(json.loads, out.splitlines())}
    assert process.returncode == 0
    assert found["good"][0] == "" and found["bad"][0] == "bad it is"
    assert found["for ever"][0] == "the grammar takes more than 0.4 s to compile (--grammar-compile-timeout)"
    assert found["for ever"][1] < 5
    assert "broke on this grammar" in found["broken"][0]
    assert "too much memory" in found["greedy"][0]


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[str]]:
    with tried(120, "good", "for ever") as process:
        yield process
        process.kill()


def test_nothing_of_it_outlives_a_killed_rank(waiting: subprocess.Popen[str]) -> None:
    assert waiting.stdout is not None
    waiting.stdout.readline()
    family = wait_for(lambda: len(found := psutil.Process(waiting.pid).children(recursive=True)) == 2 and found, 10, "a trial under way")
    assert TITLE in family[0].cmdline()[0]
    waiting.kill()
    wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family), 5, "the end of all")


@pytest.mark.parametrize(
    ("kind", "text", "doubt"),
    [
        ("regex", "a", True),
        ("ebnf", "root ::= 'a'", True),
        ("json_schema", '{"type":"object","properties":{"a":{"type":"string","maxLength":256}}}', False),
        ("json_schema", '{"type":"string","pattern":"(a|b)*"}', True),
        ("json_schema", '{"type":"string","maxLength":99999}', True),
        ("json_object", "", False),
    ],
)
def test_what_a_client_makes_automata_of_is_doubtful(kind: str, text: str, doubt: bool) -> None:
    assert doubtful(Grammar(kind, text)) is doubt  # type: ignore[arg-type]


def test_a_matcher_pays_back_what_it_overdrew_and_ends_when_it_does_not() -> None:
    now, cost = [0.0], [0.0]

    class Costly:
        terminated = False

        def masks(self, drafts: object, out: object) -> None:
            now[0] += cost[0]

        def advance(self, tokens: object) -> int:
            now[0] += cost[0]
            return 1

    matcher = Budgeted(Costly(), 0.01, clock=lambda: now[0])  # type: ignore[arg-type]
    for cost[0] in (0.07, *[0.0] * 6, 0.07, *[0.0] * 20):
        matcher.masks([], None)  # type: ignore[arg-type]
        matcher.advance([1])
    cost[0] = 0.02
    with pytest.raises(GrammarTooDear, match="more than the 10 ms of each step"):
        for _ in range(100):
            matcher.masks([], None)  # type: ignore[arg-type]
    cost[0] = 10.0
    alone = Budgeted(Costly(), 0.01, clock=lambda: now[0])  # type: ignore[arg-type]
    alone.masks([], None)  # type: ignore[arg-type]
    with pytest.raises(GrammarTooDear):
        alone.masks([], None)  # type: ignore[arg-type]
