"""A model split over real processes gives the logits of the whole one, and each rank gives the same."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import LaunchSettings, ParallelSettings, Settings
from engine.model.hf_config import ModelConfigError
from engine.model.registry import load_model
from engine.parallel.group import Group
from tests.engine.paged_rows import Rows, drive, sample_texts
from tests.ports import free_port
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]


def run_ranks(
    folder: Path, out: Path, world: int, nodes: int = 1, env: dict[str, str] | None = None, dtype: str = "float32"
) -> list[list[torch.Tensor]]:
    address = f"127.0.0.1:{free_port()}" if nodes > 1 else ""
    processes = []
    for rank in range(world):
        parallel = ParallelSettings(tp=world, nnodes=nodes, dist_init_addr=address, rendezvous_timeout_s=60)
        settings = Settings(parallel=parallel, launch=LaunchSettings(run_dir=str(out)))
        settings = dataclasses.replace(settings, parallel=dataclasses.replace(parallel, node_rank=settings.node_of(rank)))
        path = out / f"settings-{rank}.json"
        path.write_text(settings.to_json())
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.engine.paged_rows", str(path), str(rank), str(folder), str(out / f"{rank}.pt"), dtype],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        errors = [process.communicate(timeout=90)[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)
    assert [process.returncode for process in processes] == [0] * world, errors
    return [torch.load(out / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "nodes", "model", "env"),
    [
        pytest.param(2, 1, {"arch": "llama", "attention_bias": True, "mlp_bias": True}, {}, id="biases"),
        pytest.param(2, 1, {"arch": "qwen3", "tied": True, "vocab": 509}, {}, id="vocabulary that does not divide"),
        pytest.param(2, 1, {"arch": "qwen2"}, {"LASTBATCH_NATIVE": "0"}, id="no compiler"),
        pytest.param(4, 1, {"arch": "llama", "heads": 8, "kv_heads": 2}, {}, id="more ranks than key/value heads"),
        pytest.param(2, 2, {"arch": "mistral", "kv_heads": 1, "sliding_window": 9}, {}, id="two nodes, one key/value head"),
    ],
)
def test_logits_of_a_split_model_equal_the_whole_ones(
    world: int, nodes: int, model: dict[str, Any], env: dict[str, str], tmp_path: Path
) -> None:
    folder = tiny_model(tmp_path / "model", **model)
    alone = Rows(load_model(folder, dtype="float32", group=Group(), device=torch.device("cpu")), sample_texts(model.get("vocab", 512)))
    drive(alone)
    split = run_ranks(folder, tmp_path, world, nodes, env)
    for row in range(len(alone.texts)):
        assert all(torch.equal(split[0][row], other[row]) for other in split[1:]), "ranks must agree to the bit"
        assert (split[0][row] - alone.all_logits(row)).abs().max() <= 1e-4


def test_ranks_of_a_bfloat16_model_agree_to_the_bit_and_stay_near_the_whole_one(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", dtype="bfloat16")
    alone = Rows(load_model(folder, group=Group(), device=torch.device("cpu")), sample_texts(512), dtype=torch.bfloat16)
    drive(alone)
    first, second = run_ranks(folder, tmp_path, 2, dtype="bfloat16")
    for row in range(len(alone.texts)):
        assert torch.equal(first[row], second[row])
        assert (first[row] - alone.all_logits(row)).abs().max() <= 0.15


def test_a_number_of_ranks_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, heads=9, kv_heads=3, hidden=72)
    with pytest.raises(ModelConfigError, match=r"--tp: 2 does not divide 9 query heads, 3 key/value heads"):
        load_model(folder, group=Group(0, 2), device=torch.device("cpu"))
