"""Whatever a folder holds, a verdict comes out of it, soon and without an exception."""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blackbox import BOX_BYTES, BlackBox, Header
from monitors import casefolder, engines
from monitors.capture.redact import redact
from monitors.judge import leak
from monitors.judge.verdict import Class
from monitors.observe import answers, batchlog, clients, collectives, dumps, gpu, metrics, process, stacks, units

CASES = Path(__file__).parent / "cases"
SHARED = Path(__file__).parents[3] / "shared"
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "300"))  # `make fuzz` sets 10,000
NAMES = ("server.log", "journal.jsonl", "gpu.csv", "nvidia-smi.txt", "ps.txt", "metrics.txt", "health.txt", "events.txt", "clocks.json",
         "progress.json", "pyspy-0.txt", "pyspy-0.json", "pyspy-0.t3.json", "pyspy-x.txt", "manifest.json", "rank-0.box", "top.txt",
         "proc-status.txt", "stream.sse", "response.json", "systemctl-show.txt", "smoke.txt", "proxy.log", "prefill.log", "gdb-0.txt",
         "ncclras.txt", "fr-summary.csv", "fr-0.json", "attempts.csv", "metrics.t60.txt", "kubectl-get.txt")  # fmt: skip
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


LINES = sorted(
    {
        line
        for path in itertools.chain(CASES.glob("*/*"), SHARED.glob("formats/*"), SHARED.glob("cases/*/*"))
        if path.is_file() and path.name != "case.yaml"
        for line in path.read_text(errors="replace").splitlines()
        if line.strip()
    }
)
FILES = [path for path in sorted((*CASES.glob("*/*"), *SHARED.glob("cases/*/*"))) if path.name != "case.yaml"]


def test_mutated_log_lines_are_read_or_skipped() -> None:
    chance = random.Random(20)
    dialects = [engines.load(name) for name in engines.names()]
    for _ in range(ROUNDS):
        data = b"\n".join(mutated(chance.choice(LINES), chance) for _ in range(3))
        log = batchlog.read_text(data, chance.choice(dialects), "x.log")
        assert log.lines >= 1
        batchlog.read_journal(data, dialects[0], "x.jsonl")


READERS: dict[str, Callable[[str], object]] = {
    "metrics": metrics.parse,
    "pyspy": lambda text: stacks.from_text(text, "0", "x"),
    "pyspy json": lambda text: stacks.from_json(text, "0", "x"),
    "gdb": lambda text: dumps.from_gdb(text, "0", "x"),
    "faulthandler": lambda text: dumps.from_faulthandler(text, "0", "x"),
    "embedded": lambda text: dumps.embedded(text, engines.load("sglang"), "x"),
    "gpu csv": lambda text: gpu.from_csv(text, "x"),
    "gpu table": lambda text: gpu.from_table(text, "x"),
    "ps": lambda text: process.from_text(text, engines.load("vllm"), "x"),
    "status": lambda text: process.from_status(text, engines.load("vllm"), "x"),
    "recorder": lambda text: collectives.recorder(text.encode(errors="replace"), "x", 0),
    "summary": lambda text: collectives.summary(text, "x"),
    "ras": lambda text: collectives.ras(text, "x"),
    "stream": lambda text: answers.from_sse(text, "x"),
    "response": lambda text: answers.from_json(text, "x"),
    "clients": lambda text: clients.from_text(text, "x"),
    "unit": lambda text: units.from_show(text, "x"),
    "leak": lambda text: leak.scan(text) or leak.degenerate(text),
}


@pytest.mark.parametrize("name", READERS)
def test_mutated_evidence_is_read_or_refused_with_a_reason(name: str) -> None:
    """A reader gives values or raises ValueError; what raises anything else would end a judgement."""
    chance = random.Random(name)
    for _ in range(max(20, ROUNDS // (1 if name in ("metrics", "pyspy") else 6))):
        text = mutated(chance.choice(FILES).read_text(errors="replace"), chance).decode(errors="replace")
        try:
            READERS[name](text)
        except ValueError as error:
            assert str(error)


def test_mutated_folders_of_every_case_are_judged(tmp_path: Path) -> None:
    chance = random.Random(4)
    folders = sorted({path.parent for path in FILES})
    for number in range(max(60, ROUNDS)):
        folder = tmp_path / str(number % 50)
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for path in chance.choice(folders).iterdir():
            if path.name != "case.yaml" and chance.random() < 0.9:
                (folder / path.name).write_bytes(mutated(path.read_text(errors="replace"), chance))
        (folder / chance.choice(NAMES)).write_bytes(mutated(chance.choice(FILES).read_text(errors="replace"), chance))
        verdict = casefolder.judge(folder)
        assert verdict.verdict in Class and 0 <= verdict.confidence <= 1
        json.dumps(verdict.to_json())
