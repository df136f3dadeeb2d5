"""Rank 0 draws and the group shares what it drew: every rank commits the same tokens, sampled ones too."""

from __future__ import annotations

from pathlib import Path

from engine.blackbox import EventKind
from tests.e2e.serving import serving
from tests.tiny_models import tiny_model


def test_every_rank_commits_what_rank_0_drew(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", layers=2)
    args = ("--tp", "2", "--grammar-backend", "none", "--speculative-algorithm", "NGRAM")
    with serving(model, tmp_path, *args) as served:
        first = served.complete(max_tokens=40, temperature=1.0, seed=4)
        again = served.complete(max_tokens=40, temperature=1.0, seed=4)
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        runs = []
        for rank in (0, 1):
            runs.append({(e.a, e.d): (e.b, e.c) for e in served.box(rank).events if e.kind is EventKind.accepted})
        assert runs[0]
        assert runs[0] == runs[1]
        steps = [[e.b for e in served.box(rank).events if e.kind is EventKind.batch_begin] for rank in (0, 1)]
        assert steps[0] == steps[1], "ranks laid out different token counts"
