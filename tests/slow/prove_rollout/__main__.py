"""``python -m tests.slow.prove_rollout [--rows A,B] [--again]``: each row of what can go wrong with a rollout, for real.

Rows keep their results (``docs/results/prove-rollout.json``): a run that was cut off goes on, ``--again`` starts anew,
``--rows`` plays those whose names begin so once more. Prints the table, and keeps it in ``docs/results``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.e2e import nodes
from tests.slow.prove_rollout import cuts
from tests.slow.prove_rollout.row import Row, restored, table
from tests.slow.prove_rollout.rows import ROWS
from tests.slow.prove_rollout.stage import Stage

ENGINE_NAMES = tuple(
    f"engine: {name}"
    for name in ("good change", "unknown flag", "crash on first decode", "crash after 100 requests", "boot hang",
                 "healthy but garbage answers", "healthy but no progress", "flag live on one rank only",
                 "old traceback before the restart", "caller regression", "throughput loss")
)  # fmt: skip
ABOUT = """Rows were taken at several times, on two
cores that others used too (load 2 to 17): a row's seconds are to be read beside its own boots. In brackets: what opsctl gives
as its reason."""
RESULTS = Path(__file__).parents[3] / "docs" / "results"


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make prove-rollout ARGS=...", description=__doc__)
    parser.add_argument("--rows", default="", help="only those whose names begin so, separated by commas; played again")
    parser.add_argument("--again", action="store_true", help="forget what was kept")
    parser.add_argument("--kills", type=int, default=300, help="rollouts of the contract server cut at drawn moments [%(default)s]")
    parser.add_argument("--engine-kills", type=int, default=20, help="the same of the engine [%(default)s]")
    parser.add_argument("--jobs", type=int, default=1, help="how many deployments are cut at once [%(default)s]")
    parser.add_argument("--begin-within-s", type=float, default=float("inf"), help="begin no further rollout to cut after so long")
    options = parser.parse_args(args)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nodes and services are taken down then, too
    why = nodes.missing(ssh=True)
    if why:
        print(f"prove-rollout: {why}", file=sys.stderr)
        return 7
    kept_file = RESULTS / "prove-rollout.json"
    kept: dict[str, Row] = {}
    names = [*ROWS, *ENGINE_NAMES]
    if kept_file.exists() and not options.again:
        kept = {name: restored(data) for name, data in json.loads(kept_file.read_text()).items() if name in names}
    chosen = [name for name in names if any(name.startswith(word) for word in options.rows.split(",") if word)]
    todo = chosen or [name for name in names if name not in kept or kept[name].problems]
    if small := [name for name in todo if name in ROWS]:
        play(small, kept, kept_file)
    if large := [name for name in todo if name in ENGINE_NAMES]:
        play_engine(large, kept, kept_file)
    counts = {}
    for way, wanted in (("contract", options.kills), ("engine", options.engine_kills)):
        counts[way] = cuts.play(way, 0 if chosen else wanted, RESULTS / "prove-rollout-kills.json", jobs=options.jobs,
                                begin_within_s=options.begin_within_s - (time.monotonic() - began))  # fmt: skip
    rows = [kept[name] for name in names if name in kept]
    bad = [row for row in rows if row.problems]
    cut = "\n".join(cuts.told(count, way) for way, count in counts.items())
    text = f"{table(rows)}\n\n{len(rows)} of {len(names)} rows, {len(bad)} not as they must be.\n\n{cut}"
    boot = next((row.boot_s for row in rows), 0.0)
    head = f"# Rollouts on two systemd nodes over ssh\n\n`make prove-rollout`. One boot of the contract server: {boot} s. {ABOUT}\n\n"
    (RESULTS / "prove-rollout.md").write_text(f"{head}{text}\n")
    print(text)
    between = sum(count["between"] for count in counts.values())
    return 9 if bad or between or len(rows) < len(names) else 0


def play_engine(todo: Sequence[str], kept: dict[str, Row], kept_file: Path) -> None:
    from tests.slow.prove_rollout.engine_rows import ROWS as ENGINE
    from tests.slow.prove_rollout.engine_rows import Engine

    with tempfile.TemporaryDirectory(prefix="prove-rollout-") as scratch, contextlib.ExitStack() as undo:
        stage = Engine(Path(scratch), undo)
        for name in todo:
            begun = time.monotonic()
            try:
                stage.reset()
                stage.note_boot()
                keep(ENGINE[name](stage, name), kept, kept_file, time.monotonic() - begun, f"{stage.told} {stage.answer.get('errors')}")
            except Exception:
                traceback.print_exc()
                print(f"prove-rollout: {name}: could not be played", file=sys.stderr, flush=True)


def keep(row: Row, kept: dict[str, Row], kept_file: Path, seconds: float, told: str) -> None:
    kept[row.name] = row
    print(f"prove-rollout: {row.name}: {'; '.join(row.problems) or 'as it must'} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    if row.problems:
        print(told, file=sys.stderr, flush=True)
    kept_file.write_text(json.dumps({key: one.data() for key, one in kept.items()}, indent=1) + "\n")


def play(todo: Sequence[str], kept: dict[str, Row], kept_file: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="prove-rollout-") as scratch:
        stage: Stage | None = None
        try:
            for name in todo:
                begun = time.monotonic()
                try:
                    stage = stage or Stage(Path(scratch))
                    stage.reset()
                    row = ROWS[name](stage, name)
                    keep(row, kept, kept_file, time.monotonic() - begun, f"{stage.told} {json.dumps(stage.answer.get('errors', []))}")
                except Exception:  # one row that cannot be played hides no other
                    traceback.print_exc()
                    print(f"prove-rollout: {name}: could not be played", file=sys.stderr, flush=True)
        finally:
            if stage is not None:
                stage.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
