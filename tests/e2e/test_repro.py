"""The incident's experiment on the real engine: held concurrency that wedges nothing, then the fault, found by it."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest

from opsctl import cli
from tests.e2e.serving import serving
from tests.opsctl.site import Ran
from tests.tiny_models import tiny_model

ENGINE = ("--tp", "2", "--enable-faults", "--watchdog-timeout", "90", "--speculative-algorithm", "NGRAM", "--context-length", "1024")
PLAYBOOK = """name: repro-c
kind: experiment
summary: C on a tiny model
hypothesis:
  - probe: answer
method:
  - name: replica
    deadline_s: 300
    repro:
      runs: 1
      seconds: 60
      agents: {streams: 2, max_tokens: 120, context_tokens: 800}
      probes: {constrained: true, max_tokens: 400, most: 3, expect: json}
      overlap: {share: 0.5, agents: 1}
      stall_s: 15
      counts: 3
"""


def opsctl(*args: str) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    code = cli.main(args, dict(os.environ), stdin=io.StringIO(), stdout=out, stderr=err)
    return Ran(int(code), out.getvalue(), err.getvalue())


@pytest.mark.slow
def test_the_agent_loop_and_a_constrained_scan_wedge_a_server_with_the_fault_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks/repro-c.yaml").write_text(PLAYBOOK)
    fleet = tmp_path / "fleet.toml"
    with serving(tiny_model(tmp_path / "tiny", layers=2), tmp_path, *ENGINE) as served:
        fleet.write_text(
            f'[deployment.tiny]\nengine = "lastbatch"\napi = "{served.url}"\nservice = "embedded"\nwatchdog_s = 90\nallow_faults = true\n'
            f'bundle_dir = "{tmp_path}/bundles"\n[[deployment.tiny.node]]\nname = "a"\n[[deployment.tiny.node.service]]\nunit = "tiny"\n'
            f'ranks = [0, 1]\nlog = "{served.log}"\nrun_dir = "{served.run_dir}"\n'
        )
        sound = opsctl("repro", "run", "C", "--fleet", str(fleet), "--json")
        assert sound.code == 0, (sound.data, sound.err)
        run = sound.data["runs"][0]
        assert run["overlap"]["source"] == "black box" and run["overlap"]["share"] > 0.5 and run["overlap"]["of"] > 10
        assert run["expected"] == 3 and run["turn_errors"] == {}

        served.arm("grammar.verify_desync")
        found = opsctl("repro", "run", "C", "--fleet", str(fleet), "--json")
        assert found.code == 9, (found.data, found.err)
        run = found.data["runs"][0]
        assert run["outcome"] == "reproduced" and run["verdict"] == "hang_grammar_barrier", run
        assert 0 <= run["after_s"] < 20 and Path(run["bundle"]).is_dir()

        began = time.monotonic()
        told = opsctl("triage", "--fleet", str(fleet), "--json", "--fail-on-verdict")
        assert time.monotonic() - began < 25.0  # ten, on a machine that is not crowded
        assert told.code == 9 and [fault["verdict"] for fault in told.data["faults"]] == ["hang_grammar_barrier"], told.data["faults"]
        assert {row["phase"] for row in told.data["ranks"]} == {"wait_device"}
        assert next(batch for batch in told.data["batches"] if batch["kind"] == "decode")["text"].endswith("NOT ENDED")
