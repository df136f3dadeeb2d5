"""Whatever a folder holds, a verdict comes out of it, soon and without an exception."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blackbox import BOX_BYTES, BlackBox, Header
from monitors import casefolder, engines
from monitors.capture.redact import redact
from monitors.judge.verdict import Class
from monitors.observe import batchlog

CASES = Path(__file__).parent / "cases"
NAMES = ("server.log", "journal.jsonl", "gpu.csv", "nvidia-smi.txt", "ps.txt", "metrics.txt", "health.txt", "events.txt", "clocks.json",
         "progress.json", "pyspy-0.txt", "pyspy-0.json", "pyspy-0.t3.json", "pyspy-x.txt", "manifest.json", "rank-0.box")  # fmt: skip
SAMPLES = [path.read_text() for path in sorted(CASES.glob("*/*"))]


def mutated(text: str, chance: random.Random) -> bytes:
    """A recorded file with lines dropped, doubled, swapped and cut, and bytes changed."""
    lines = text.splitlines(keepends=True) or [""]
    for _ in range(chance.randrange(6)):
        at = chance.randrange(len(lines))
        what = chance.randrange(5)
        if what == 0:
            lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
        elif what == 1:
            lines.insert(at, lines[at])
        elif what == 2:
            lines[at], lines[0] = lines[0], lines[at]
        elif what == 3:
            lines[at] = lines[at].replace("0", "-1e999").replace(":", "::")
        elif len(lines) > 1:
            del lines[at]
    data = bytearray("".join(lines).encode())
    for _ in range(chance.randrange(4)):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("seed", range(8))
def test_mutated_case_folders_are_judged_and_never_raise(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for round_number in range(25):
        folder = tmp_path / str(round_number)
        folder.mkdir()
        for name in chance.sample(NAMES, chance.randrange(1, 8)):
            (folder / name).write_bytes(mutated(chance.choice(SAMPLES), chance))
        verdict = casefolder.judge(folder)
        assert verdict.verdict in Class and 0 <= verdict.confidence <= 1
        json.dumps(verdict.to_json())


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_black_box_is_a_gap_or_a_reading_and_never_raises(seed: int, tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "rank-0.box", Header(1, 0, 1, "d"))
    box.device_begin(1)
    box.close()
    whole = bytearray((tmp_path / "rank-0.box").read_bytes())
    chance = random.Random(seed)
    for _ in range(10):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 40)):
            near = chance.choice((chance.randrange(200), 32768 + chance.randrange(1500), 36864 + chance.randrange(200)))
            data[chance.choice((near, chance.randrange(BOX_BYTES)))] = chance.randrange(256)
        (tmp_path / "rank-0.box").write_bytes(data)
        casefolder.judge(tmp_path)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=300), st.sampled_from(NAMES))
def test_any_text_in_any_file_is_judged(text: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(text, errors="replace")
        assert casefolder.judge(Path(folder)).confidence <= 0.97


HOSTILE = ("(A" + " TPa" * 4000, "a." * 50_000, "x" * 200_000, "#k " * 30_000, "(" * 20_000, "    f (" + "(" * 5000)
HOSTILE += ("A" * 3000 + ": " + "b" * 100_000, "[" + "0 " * 40_000, "secret " * 20_000, '"' + "\\" * 50_000)


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_made_to_be_slow_is_not(line: str) -> None:
    started = time.process_time()
    for name in engines.names():
        batchlog.read_text(line.encode(), engines.load(name), "x")
    redact(line, "x")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyspy-0.txt").write_text(f'Thread 1 (idle): "MainThread"\n{line}\n')
        casefolder.judge(Path(folder))
    assert time.process_time() - started < 3
