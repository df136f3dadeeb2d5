"""The incident's five experiments on the real engine with the incident's fault in it: ``python -m tests.slow.prove_repro``.

One server with the fault answers B (constrained alone) and A (nothing constrained), and wedges under C (both at once); one
whose flags were changed wedges under P as well; one that refuses constrained requests is asked by S. Times are scaled, and
the table says by how much. What is printed is what ``opsctl repro run`` printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from engine import default_model
from opsctl import cli
from tests.e2e.serving import serving

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
ENGINE = ("--enable-faults", "--speculative-algorithm", "NGRAM", "--context-length", "4096", "--watchdog-timeout", "300")
FAULT = ("--fault", "grammar.verify_desync")
SERVERS: dict[str, tuple[tuple[str, ...], str]] = {
    "with the fault": (("--enable-overlap-schedule", *FAULT), "BAC"),
    "with the fault, overlap schedule off": (("--disable-overlap-schedule", *FAULT), "P"),
    "constrained requests refused": (("--enable-overlap-schedule", "--grammar-backend", "none"), "S"),
}
EXPECTED = {"B": 0, "A": 0, "C": 9, "P": 9, "S": 0}


def scaled(folder: Path, letter: str, by: float) -> str:
    """The shipped experiment with its times divided; says what was changed."""
    document = yaml.safe_load((PLAYBOOKS / f"repro-{letter.lower()}.yaml").read_text())
    step = next(one for one in document["method"] if "repro" in one)["repro"]
    told = []

    def set_to(table: dict[str, Any], key: str, value: float) -> None:
        if key in table and table[key] != value:
            told.append(f"{key} {table[key]:g} -> {value:g}")
            table[key] = value

    set_to(step, "seconds", step["seconds"] / by)
    set_to(step, "runs", 1)
    set_to(step["probes"], "every_s", step["probes"].get("every_s", 0) / by)
    if letter != "S":
        set_to(step["probes"], "most", max(5, round(step["probes"]["most"] / by)))
        set_to(step, "counts", 3)
    (folder / f"repro-{letter.lower()}.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return ", ".join(told)


@contextlib.contextmanager
def site(model: Path, args: Sequence[str], tp: int) -> Iterator[tuple[Path, Path]]:
    """A served model; its fleet file and a folder for the site's own playbooks."""
    with tempfile.TemporaryDirectory(prefix="repro-") as name, serving(model, Path(name), "--tp", str(tp), *ENGINE, *args) as served:
        folder = Path(name)
        (folder / "playbooks").mkdir()
        fleet = folder / "fleet.toml"
        fleet.write_text(
            f'[deployment.d]\nengine = "lastbatch"\napi = "{served.url}"\nservice = "embedded"\nwatchdog_s = 300\n'
            f'bundle_dir = "{folder}/bundles"\n[[deployment.d.node]]\nname = "a"\n[[deployment.d.node.service]]\nunit = "d"\n'
            f'ranks = {list(range(tp))}\nlog = "{served.log}"\nrun_dir = "{served.run_dir}"\n'
        )
        yield fleet, folder / "playbooks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a Hugging Face folder; the default model without it")
    parser.add_argument("--tp", type=int, default=0, help="3 for the default model, 2 for another")
    parser.add_argument("--scale", type=float, default=8.0, help="the experiments' times are divided by this")
    parser.add_argument("--only", default="BACPS")
    chosen = parser.parse_args()
    model = Path(chosen.model) if chosen.model else default_model.path()
    tp = chosen.tp or (2 if chosen.model else 3)
    wrong = []
    for what, (args, letters) in SERVERS.items():
        mine = [letter for letter in letters if letter in chosen.only]
        if not mine:
            continue
        print(f"# lastbatch serve --tp {tp} {' '.join(ENGINE[1:])} {' '.join(args)}   ({what})", flush=True)
        with site(model, args, tp) as (fleet, playbooks):
            for letter in mine:
                changed = scaled(playbooks, letter, chosen.scale)
                out = io.StringIO()
                words = ["repro", "run", letter, "--fleet", str(fleet)]
                code = cli.main(words, dict(os.environ), stdin=io.StringIO(), stdout=out, stderr=sys.stderr)
                text = out.getvalue().replace(str(fleet.parent), "...").rstrip()
                print(f"\n$ opsctl repro run {letter}      # scaled: {changed}\n{text}\nexit status {int(code)}\n", flush=True)
                if int(code) != EXPECTED[letter]:
                    wrong.append(f"{letter} ended with {int(code)}, expected was {EXPECTED[letter]}")
    print("\n".join(wrong) or "every experiment ended as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
