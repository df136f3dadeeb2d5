"""Markup in answers by the engine's own counter: a slip is none, a good part of all answers is a leak."""

from __future__ import annotations

import json
from pathlib import Path

from monitors import casefolder
from monitors.judge.markup import Markup
from monitors.judge.verdict import Class


def after(*pages: tuple[float, float, float]) -> str:
    seen = Markup()
    for now_s, leaked, answered in pages:
        seen = seen.take(now_s, leaked, answered)
    return seen.told()


def test_a_good_part_of_all_answers_is_told_with_its_figures() -> None:
    assert after((0, 3, 100), (30, 5, 108), (60, 10, 120)) == (
        "by the engine's own count 7 of 20 answers in 60 s held markup that was not parsed"
    )


def test_a_slip_now_and_then_is_none() -> None:
    assert not after((0, 0, 0), (60, 4, 4)), "few"
    assert not after((0, 0, 0), (60, 30, 1000)), "a small part"
    assert not after(*((200.0 * n, n, n) for n in range(40))), "five in ten minutes never come together"


def test_what_was_before_the_monitors_start_and_before_the_servers_is_not_counted() -> None:
    assert not after((0, 400, 900))
    assert not after((0, 400, 900), (10, 2, 5)), "a server that has started again"
    assert not after((0, 0, 0), (10, 9, None)), "a page without the counter"  # type: ignore[arg-type]


def test_the_verdict_is_the_judges_from_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "health.txt").write_text("GET /health 200 0.002 s\n")
    (tmp_path / "progress.json").write_text(json.dumps({"markup": after((0, 0, 0), (60, 10, 12))}))
    verdict = casefolder.judge(tmp_path)
    assert verdict.verdict is Class.parser_leak and "10 of 12" in verdict.evidence[0].text
