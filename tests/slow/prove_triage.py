"""Triage of live faults: ``python -m tests.slow.prove_triage``. Each fault of the engine in a server of its own; one look.

A fault counts as told when the first alarm is of a class that fits it and the answer came within the deadline.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from opsctl import cli
from tests.e2e.serving import Served, serving, wait_for
from tests.e2e.test_monitor_on_engine import ENGINE, trigger
from tests.tiny_models import tiny_model

DEADLINE_S = 10.0
FAULTS: dict[str, set[str]] = {
    "grammar.verify_desync": {"hang_grammar_barrier"},
    "collective.mismatch:rank=1,after_steps=5": {"hang_symmetric_spin"},
    "collective.skip:rank=1,after_steps=5": {"hang_tp_desync"},
    "callback.stall:rank=1": {"hang_host_callback", "hang_asymmetric"},
    "callback.stall:rank=1,hold_gil=true": {"hang_host_callback", "hang_asymmetric"},
    "progress.none:after_steps=5": {"hang_control_plane"},
    "cpu.spin:rank=0": {"hang_cpu_bound"},
    "process.stop:rank=1": {"hang_stopped"},
    "": {"healthy", "idle_not_hung"},
}


def look(served: Served, folder: Path) -> tuple[dict[str, object], float]:
    """One triage: its data and what it took."""
    fleet = folder / "fleet.toml"
    fleet.write_text(
        f'[deployment.d]\nengine = "lastbatch"\napi = "{served.url}"\nservice = "embedded"\nwatchdog_s = 90\n'
        f'bundle_dir = "{folder}/bundles"\n[[deployment.d.node]]\nname = "a"\n[[deployment.d.node.service]]\nunit = "d"\n'
        f'ranks = [0, 1]\nlog = "{served.log}"\nrun_dir = "{served.run_dir}"\n'
    )
    out = io.StringIO()
    words = ["triage", "--fleet", str(fleet), "--deadline", f"{DEADLINE_S:g}", "--json"]
    began = time.monotonic()
    cli.main(words, dict(os.environ), stdin=io.StringIO(), stdout=out, stderr=sys.stderr)
    return json.loads(out.getvalue())["data"], time.monotonic() - began


def still(served: Served) -> bool:
    """Nothing has moved for five seconds although work is held: what somebody is called for."""
    before = [(box.host.progress_ns, box.device.begun, box.device.ended) for box in map(served.box, (0, 1))]
    time.sleep(5.0)
    after = [(box.host.progress_ns, box.device.begun, box.device.ended) for box in map(served.box, (0, 1))]
    return before == after and served.box(0).host.held > 0


def wedge(served: Served, fault: str) -> None:
    """Bring the fault about, again where the requests did not meet in a batch: only a shared one has it."""
    trigger(served, fault)

    def stands() -> bool:
        if still(served):
            return True
        if served.box(0).host.held == 0:
            trigger(served, fault)
        return False

    wait_for(stands, 90, f"{fault}: a wedge")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(FAULTS), help="faults, as they are armed; '' for none")
    chosen = parser.parse_args().only
    wrong = 0
    print(f"{'fault':<42} {'first verdict':<24} {'confidence':<10} {'seconds':<8} told", flush=True)
    for fault in chosen:
        classes = FAULTS[fault]
        with tempfile.TemporaryDirectory(prefix="triage-") as name:
            folder = Path(name)
            with serving(tiny_model(folder / "tiny", layers=2), folder, *ENGINE) as served:
                served.complete()
                if fault:
                    wedge(served, fault)
                data, seconds = look(served, folder)
        first = data["faults"][0]  # type: ignore[index]
        told = first["verdict"] in classes and seconds <= DEADLINE_S + 1
        wrong += not told
        print(
            f"{fault or '(none)':<42} {first['verdict']:<24} {first['confidence']:<10} {seconds:<8.1f} {'yes' if told else 'NO'}",
            flush=True,
        )
    print(f"{len(chosen) - wrong} of {len(chosen)} told")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
