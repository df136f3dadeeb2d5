"""The accuracy gate in small: a real server against transformers on the texts of ``make eval``."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.text.tokenizer import Tokenizer
from tests.slow.eval import F32_TOLERANCE, Cell, Distance, distance, judge, serve, texts
from tests.slow.eval_reference import Reference, Said
from tests.tiny_models import tiny_model

CHOSEN = ("letter", "json", "repetition", "unicode")  # one token, structure, what speculation is for, more than ASCII
LIMIT = Distance(F32_TOLERANCE, F32_TOLERANCE, 0)


def _folder(at: Path, seed: int) -> Path:
    return tiny_model(at, heads=6, kv_heads=3, hidden=48, seed=seed)


def _reference(model: Path, prompts: dict[str, str]) -> dict[str, Said]:
    show = Tokenizer.load(model).token_text
    return dict(zip(prompts, Reference(model, threads=1).said("float32", list(prompts.values()), show), strict=True))


@pytest.mark.parametrize(
    "cell", [Cell("float32", 1, "chunked", "ngram"), Cell("float32", 3, "whole", "off")], ids=lambda cell: f"tp{cell.tp}"
)
def test_the_server_says_what_transformers_says_and_another_model_would_be_noticed(tmp_path: Path, cell: Cell) -> None:
    prompts = {name: text for name, text in texts().items() if name in CHOSEN}
    assert len(prompts) == len(CHOSEN)
    model = _folder(tmp_path / "model", seed=5)
    heard = serve(cell, model, tmp_path, prompts, ["--threads-per-rank", "1"])
    outcome = judge(cell, heard, _reference(model, prompts), LIMIT)
    assert outcome.good, f"{outcome.distance}; {outcome.wrong}"
    other = judge(cell, heard, _reference(_folder(tmp_path / "other", seed=6), prompts), LIMIT)
    assert not other.good
    assert other.wrong
    assert other.distance.greatest > 1000 * F32_TOLERANCE


def _judged(dtype: str, scores: tuple[float, ...], answer: tuple[str, ...], limit: Distance) -> tuple[bool, int]:
    wanted = {"text": Said((-1.0, -2.0), ("a", "b"), (3.0, 0.2))}
    outcome = judge(Cell(dtype, 1, "whole", "off"), {"text": (Said(scores, answer), Said((), answer))}, wanted, limit)
    return outcome.good, len(outcome.apart)


def test_in_f32_no_answer_may_part_and_one_log_probability_outside_is_enough() -> None:
    assert _judged("float32", (-1.0, -2.00005), ("a", "b"), LIMIT) == (True, 0)
    assert _judged("float32", (-1.0, -2.0002), ("a", "b"), LIMIT) == (False, 0)
    assert _judged("float32", (-1.0, -2.0), ("a", "c"), LIMIT) == (False, 2)


def test_in_bf16_an_answer_may_part_at_a_tie_only() -> None:
    assert _judged("bfloat16", (-1.1, -2.0), ("a", "c"), Distance(0.3, 0.1, 2)) == (True, 2)
    assert _judged("bfloat16", (-1.1, -2.0), ("c", "b"), Distance(0.3, 0.1, 2)) == (False, 2)
    assert _judged("bfloat16", (-1.1, -2.1), ("a", "b"), Distance(0.3, 0.05, 2)) == (False, 0)  # the mean has its own limit


def test_missing_log_probabilities_are_an_error_not_a_distance_of_nothing() -> None:
    with pytest.raises(ValueError, match="zip"):
        distance([(-1.0,)], [(-1.0, -2.0)])


def test_the_texts_are_those_that_the_gate_is_known_by() -> None:
    found = texts()
    assert len(found) == 12
    assert len(found["letter"]) == 1
    assert all(found.values())
