"""The C kernels against torch, and how C parts are built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import Settings
from engine.exec.batch import ForwardBatch
from engine.exec.kv import KVPool
from engine.model.attention import AttentionPlan, attend
from engine.model.registry import load_model
from engine.native import build, kernels
from engine.parallel.group import Group
from tests.engine.paged_rows import Rows, drive, sample_texts
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def library() -> object:
    found = kernels.load()
    if found is None:
        pytest.skip(f"kernels: {build.paths()['kernels']}")
    return found


def ragged(queries: tuple[int, ...], lengths: tuple[int, ...], page_size: int) -> ForwardBatch:
    pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(3)).int().split(pages)
    tables = torch.zeros(len(queries), max(pages), dtype=torch.int32)
    for row, part in enumerate(order):
        tables[row, : len(part)] = part
    positions = [torch.arange(length - count, length) for count, length in zip(queries, lengths, strict=True)]
    slots = [tables[row][where // page_size].long() * page_size + where % page_size for row, where in enumerate(positions)]
    total = sum(queries)
    return ForwardBatch(1, torch.zeros(total, dtype=torch.int64), torch.cat(positions), torch.cat(slots), queries, lengths, tables,
                        page_size, torch.arange(total))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"), [(9, 3, 64, 16), (4, 4, 20, 1), (8, 1, 128, 32), (6, 2, 80, 16), (40, 2, 16, 16)]
)
def test_paged_attention_in_c_equals_torch(
    library: object, heads: int, kv_heads: int, head_dim: int, page_size: int, window: int, dtype: torch.dtype
) -> None:
    batch = ragged((150, 1, 5, 1, 37), (300, 1, 129, 200, 37), page_size)
    batch.check()
    total = sum(batch.query_lens)
    generator = torch.Generator().manual_seed(5)
    kv = KVPool(1, sum(-(-length // page_size) for length in batch.kv_lens), page_size, kv_heads, head_dim, dtype)
    kv.keys[0].copy_(torch.randn(kv.keys[0].shape, generator=generator) * 2)
    kv.values[0].copy_(torch.randn(kv.values[0].shape, generator=generator))
    qkv = torch.randn(total, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    kv.keys[0][batch.slots] = qkv[:, heads : heads + kv_heads]
    kv.values[0][batch.slots] = qkv[:, heads + kv_heads :]
    plan = AttentionPlan(batch, frozenset({window}))
    expected = attend(qkv[:, :heads].float(), kv.keys[0].float(), kv.values[0].float(), plan, window, head_dim**-0.5)

    still = torch.cat((torch.ones(400, head_dim // 2), torch.zeros(400, head_dim // 2)), 1)  # turns by nothing
    layer = kernels.LayerStruct(window=window)
    model = kernels.ModelStruct(kernels.ctypes.addressof(layer), still.data_ptr(), 0, heads, kv_heads, head_dim, 0,
                                dtype is torch.bfloat16, 0, 0, 1e-6, head_dim**-0.5)  # fmt: skip
    starts = torch.tensor([0, *torch.tensor(batch.query_lens).cumsum(0)], dtype=torch.int32)
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32)
    out = torch.empty(total, heads, head_dim, dtype=dtype)
    step = kernels.StepStruct(
        tokens=total, rows=len(batch.query_lens), table_width=batch.page_tables.shape[1], page_size=page_size,
        positions=batch.positions.data_ptr(), slots=batch.slots.data_ptr(), tables=batch.page_tables.data_ptr(),
        starts=starts.data_ptr(), kv_lens=lengths.data_ptr(), keys=kv.keys[0].data_ptr(), values=kv.values[0].data_ptr(),
        layer_bytes=kv.layer_bytes, qkv=qkv.data_ptr(), attended=out.data_ptr(),
    )  # fmt: skip
    library.lastbatch_attention(kernels.ctypes.byref(model), kernels.ctypes.byref(step), 0)  # type: ignore[attr-defined]
    assert (out.float() - expected).abs().max() <= (2e-6 if dtype is torch.float32 else 0.02) * max(1, expected.abs().max())


@pytest.mark.parametrize(("n", "k"), [(32, 64), (48, 34), (16, 2), (176, 130)])
def test_products_by_panels_equal_torch_for_every_number_of_rows(library: object, n: int, k: int) -> None:
    if not library.lastbatch_has_panels():  # type: ignore[attr-defined]
        pytest.skip("panels need a CPU with AVX-512 BF16")
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(n, k, generator=generator).bfloat16()
    panels = torch.empty_like(w)
    library.lastbatch_pack(w.data_ptr(), n, k, panels.data_ptr())  # type: ignore[attr-defined]
    model = kernels.ModelStruct(is_bf16=1)
    for rows in range(1, 20):
        x = torch.randn(rows, k, generator=generator).bfloat16()
        out = torch.full((rows, n), torch.nan)
        library.lastbatch_head(kernels.ctypes.byref(model), 1, x.data_ptr(), rows, k, panels.data_ptr(), n, out.data_ptr())  # type: ignore[attr-defined]
        assert (out - x.float() @ w.float().t()).abs().max() <= 1e-5 * k**0.5 * 4


@pytest.mark.parametrize(
    ("level", "dtype"), [("portable", "float32"), ("avx2", "float32"), ("portable", "bfloat16"), ("avx512", "bfloat16")]
)
def test_every_instruction_set_gives_the_same_logits(level: str, dtype: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", dtype=dtype, hidden=80, heads=5, kv_heads=1, vocab=528)
    settings, out = tmp_path / "settings.json", tmp_path / "logits.pt"
    settings.write_text(Settings().to_json())
    done = subprocess.run([sys.executable, "-m", "tests.engine.paged_rows", settings, "0", folder, out, dtype], cwd=ROOT, text=True,
                          capture_output=True, timeout=60, env={**os.environ, "LASTBATCH_NATIVE": level})  # fmt: skip
    assert done.returncode == 0, done.stderr
    if "lacks it" in done.stdout:
        pytest.skip(done.stdout)
    assert f"C ({level})" in done.stdout
    model = load_model(folder, group=Group(), device=torch.device("cpu"))
    here = Rows(model, sample_texts(528), dtype=torch.float32 if dtype == "float32" else torch.bfloat16)
    drive(here)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for row, logits in enumerate(torch.load(out)):
        assert (logits - here.all_logits(row)).abs().max() <= tolerance


def run_build(cache: Path, **env: str) -> subprocess.Popen[str]:
    program = "from engine.native import build; print(build.library('collectives') is not None, build.paths()['collectives'])"
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            env={**os.environ, "XDG_CACHE_HOME": str(cache), **env})  # fmt: skip


def test_processes_that_build_at_once_into_an_empty_cache_all_get_the_library(tmp_path: Path) -> None:
    processes = [run_build(tmp_path) for _ in range(4)]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == ["True C"] * 4
    left = {path.name for path in (tmp_path / "lastbatch" / "native").iterdir()}
    assert {name.split("-")[0] for name in left} <= {"collectives", "kernels"}
    assert all(name.endswith(".so") for name in left)


def test_without_a_compiler_the_fallback_is_named_with_its_reason(tmp_path: Path) -> None:
    process = run_build(tmp_path, PATH="/nonexistent", CC="")
    assert process.communicate(timeout=60)[0].strip() == "False fallback: no C compiler (gcc, cc or clang) on PATH"


def test_a_compiler_that_fails_is_named_with_its_message(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho 'error: no space left' >&2\nexit 1\n")
    compiler.chmod(0o755)
    process = run_build(tmp_path, CC=str(compiler))
    assert process.communicate(timeout=60)[0].strip() == f"False fallback: collectives: {compiler}: error: no space left"


def test_a_built_library_is_used_again_where_the_compiler_is_gone(tmp_path: Path) -> None:
    assert run_build(tmp_path).communicate(timeout=60)[0].strip() == "True C"
    assert run_build(tmp_path, PATH="/nonexistent", CC="").communicate(timeout=60)[0].strip() == "True C"
