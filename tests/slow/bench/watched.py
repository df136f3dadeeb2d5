"""What the hang monitor costs: the engine's throughput with and without it, in turns, and its own CPU and memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.serving import Served, wait_for
from tests.slow.bench import client
from tests.slow.bench.figures import Pair
from tests.slow.bench.prompts import several
from tests.slow.monitor_cost import cpu_s, measure, rss_mb

if TYPE_CHECKING:
    from tests.slow.bench.parts import Bench

ROOT = Path(__file__).parents[3]
RANKS = 8
_MEASURED_S = 20.0


def monitor(bench: Bench) -> list[Pair]:
    """Tokens per second with the monitor beside the server and without it; the monitor's share of a core meanwhile; and
    its share and memory beside eight busy ranks (small processes with real black boxes)."""
    sizes, pairs = bench.sizes, []
    with bench.served() as served:
        bench.note_load("monitor")
        for streams in sizes.streams:
            label = f"{streams} at once"
            client.together(served.url, several(bench.draw, streams, sizes.prompt, bench.vocab), 4)
            rates: dict[bool, list[float]] = {True: [], False: []}
            shares, memory = [], 0.0
            for turn in bench.turns("monitor", label):
                prompts = several(bench.draw, streams, sizes.prompt, bench.vocab)
                for watched in (True, False) if turn % 2 == 0 else (False, True):
                    if not watched:
                        rates[False].append(client.together(served.url, prompts, sizes.tokens))
                        continue
                    with watching(served) as process:
                        before, began = cpu_s(process.pid), time.monotonic()
                        rates[True].append(client.together(served.url, prompts, sizes.tokens))
                        shares.append(100 * (cpu_s(process.pid) - before) / (time.monotonic() - began))
                        memory = max(memory, rss_mb(process.pid))
            note = f"the monitor took at most {max(shares):.1f} % of a core, {memory:.0f} MB"
            pairs.append(Pair("monitor", label, "tok/s", "watched", tuple(rates[True]), "alone", tuple(rates[False]), note))
    share, memory = measure(_MEASURED_S if sizes.reps > 1 else 3.0, RANKS)
    bench.say(f"monitor: beside {RANKS} busy ranks {share:.2f} % of a core (limit 1), {memory:.0f} MB resident (limit 100)")
    pairs.append(Pair("monitor", f"{RANKS} ranks, CPU", "% of a core", "measured", (share,), "limit", (1.0,)))
    pairs.append(Pair("monitor", f"{RANKS} ranks, memory", "MB", "measured", (memory,), "limit", (100.0,)))
    return pairs


@contextlib.contextmanager
def watching(served: Served) -> Iterator[subprocess.Popen[bytes]]:
    """A monitor with the settings that it comes with, which has looked once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [one["rank"] for one in served.described["ranks"]]
        (folder / "fleet.toml").write_text(
            f'[deployment.bench]\nengine = "lastbatch"\napi = "{served.url}"\nservice = "embedded"\n[[deployment.bench.node]]\nname = "a"\n'
            f'[[deployment.bench.node.service]]\nunit = "bench"\nranks = {ranks}\nlog = "{served.log}"\nrun_dir = "{served.run_dir}"\n'
        )
        argv = [sys.executable, "-m", "monitors.cli", "run", "--fleet", str(folder / "fleet.toml"), "--state-dir", str(folder / "state"),
                "--bundle-dir", str(folder / "bundles"), "--status-port", "0", "--json"]  # fmt: skip
        said = folder / "events.jsonl"
        with said.open("wb") as out:
            process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: '"event": "state"' in said.read_text(), 30, "the monitor's first look")
            yield process
            if '"stall_declared"' in said.read_text():
                raise RuntimeError("the monitor declared a stall while it was measured: these figures are of a capture")
        finally:
            process.terminate()
            process.wait(60)
