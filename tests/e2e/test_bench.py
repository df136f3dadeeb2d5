"""The bench measures what it says: real servers, every request checked, pairs taken in turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slow.bench.__main__ import main
from tests.slow.bench.client import parse
from tests.slow.bench.figures import Pair, table
from tests.tiny_models import tiny_model


def test_a_quick_run_gives_every_figure_of_its_parts_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(tmp_path, dtype="bfloat16")
    assert main(["--quick", "--json", "--reps", "2", "--parts", "throughput,refusal", "--threads", "1", "--model", str(model)]) == 0
    envelope = json.loads(capsys.readouterr().out)
    assert (envelope["command"], envelope["status"], envelope["exit_code"]) == ("bench", "ok", 0)
    parts = envelope["data"]["parts"]
    assert [row["label"] for row in parts["throughput"]["rows"]] == ["1 at once", "4 at once"]
    assert [row["label"] for row in parts["refusal"]["rows"]] == ["p50", "p99", "max"]
    for part in parts.values():
        assert part["load"]["one_minute"] >= 0
        for row in part["rows"]:
            assert len(row["ours"]) == len(row["other"]) == 2
            assert min(*row["ours"], *row["other"]) > 0
    quantiles = [row["ours"] for row in parts["refusal"]["rows"]]
    assert all(low <= middle <= high for low, middle, high in zip(*quantiles, strict=True))


def test_ratios_are_of_repetitions_taken_together() -> None:
    pair = Pair("p", "one", "tok/s", "a", (10.0, 30.0, 40.0), "b", (10.0, 10.0, 20.0))
    assert pair.ratios == (1.0, 3.0, 2.0)
    assert "30.0 [10.0..40.0]" in table([pair])
    assert "2.00 [1.00..3.00]" in table([pair])
    limited = Pair("p", "memory", "MB", "measured", (48.0,), "limit", (100.0,))
    first, second = table([pair, limited]).split("\n\n")
    assert first == table([pair]) and second == table([limited]), "a limit does not stand under the name of another side"


def test_unequal_repetitions_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        Pair("p", "one", "tok/s", "a", (1.0, 2.0), "b", (1.0,))


def test_a_stream_that_breaks_off_is_an_error() -> None:
    event = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n'
    with pytest.raises(RuntimeError, match="broke off after 1 lines"):
        parse(0.0, [(1.0, event)], "/v1/completions")


def test_time_to_first_token_is_to_the_first_text_and_rates_leave_it_out() -> None:
    events = [
        (1.0, b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n'),
        (2.0, b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n'),
        (4.0, b'data: {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "length"}]}\n'),
        (9.0, b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n'),
        (9.0, b"data: [DONE]\n"),
    ]
    answered = parse(0.5, events, "/v1/chat/completions")
    assert (answered.first_token_s, answered.decode_tokens_per_s, answered.text, answered.finish) == (1.5, 2.0, "ab", "length")


def test_a_part_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "throughput,warp"])
    assert "no part is called warp" in capsys.readouterr().err
