"""``python -m tests.slow.bench [--reps N] [--parts A,B] [--quick] [--model PATH] [--threads N] [--json]``.

Prints tables in Markdown on stdout (``--json``: one envelope with every repetition) and talks on stderr. A ratio is
the median of the ratios of repetitions that were taken one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine import default_model
from tests.slow.bench.figures import table
from tests.slow.bench.machine import describe
from tests.slow.bench.parts import PARTS, QUICK, Bench, Sizes


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description="How fast the engine serves, beside transformers' generate.")
    parser.add_argument("--reps", type=int, default=0, help="repetitions of each figure [default: 5, quick: 1]")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas [default: %(default)s]")
    parser.add_argument("--quick", action="store_true", help="one short repetition: does it run at all?")
    parser.add_argument("--model", type=Path, help="Hugging Face folder [default: that of `lastbatch model path`]")
    parser.add_argument("--threads", type=int, default=0, help="compute threads of engine and transformers [default: one a core]")
    parser.add_argument("--json", action="store_true", help="print one JSON envelope")
    options = parser.parse_args(args)
    chosen = options.parts.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"--parts: no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    sizes = QUICK if options.quick else Sizes()
    sizes = dataclasses.replace(sizes, reps=options.reps or sizes.reps)
    model = options.model or default_model.path()

    def say(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    def show(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    started = time.monotonic()
    found = {}
    with tempfile.TemporaryDirectory(prefix="lastbatch-bench-") as scratch:
        bench = Bench(model, Path(scratch), sizes, options.threads, say)
        about = {"model": model.name, "machine": describe(), "reference": bench.reference.name, "sizes": dataclasses.asdict(sizes)}
        show(f"{model.name}, bf16, greedy, prompts of {sizes.prompt} random tokens, {sizes.tokens} new tokens, {sizes.reps} repetitions: "
             f"median [least..greatest]\n{about['machine']}; {about['reference']}")  # fmt: skip
        for part in chosen:
            found[part] = PARTS[part](bench)
            show(f"\n**{part}** — {bench.loads[part]}\n\n{table(found[part])}")
    took = time.monotonic() - started
    show(f"\nThe run took {took:.0f} s.")
    if options.json:
        parts = {
            part: {"load": dataclasses.asdict(bench.loads[part]), "rows": [pair.data() for pair in pairs]} for part, pairs in found.items()
        }
        print(json.dumps({"schema": 1, "command": "bench", "status": "ok", "exit_code": 0, "errors": [],
                          "data": {**about, "seconds": took, "parts": parts}}))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
