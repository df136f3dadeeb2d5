"""What the monitor costs: ``python -m tests.slow.monitor_cost [SECONDS] [RANKS]``. CPU of one core and resident memory of
``hang-monitor run`` beside so many busy ranks with black boxes; exit 1 when above 1 % of a core or 100 MB."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.monitors.cluster import HEALTHY, ROOT, Cluster, fleet_text, until, web

_SETTLE_S = 5.0


def main(seconds: float = 30.0, ranks: int = 8) -> int:
    share, memory = measure(seconds, ranks)
    print(f"{ranks} ranks, {seconds:.0f} s: {share:.2f} % of a core (limit 1), {memory:.0f} MB resident (limit 100)")
    return 0 if share < 1 and memory < 100 else 1


def measure(seconds: float, ranks: int) -> tuple[float, float]:
    """Percent of a core and resident MB beside so many busy ranks."""
    with tempfile.TemporaryDirectory() as name, web(HEALTHY) as server, Cluster(Path(name), world=ranks) as cluster:
        folder = Path(name)
        file = folder / "fleet.toml"
        file.write_text(fleet_text([("a", cluster.run_dir, cluster.log)], server.url, ranks=ranks))
        cluster.work()
        argv = [sys.executable, "-m", "monitors.cli", "run", "--fleet", str(file), "--state-dir", str(folder / "state"),
                "--bundle-dir", str(folder / "bundles"), "--status-port", "0", "--json"]  # fmt: skip
        said = folder / "events.jsonl"
        with said.open("wb") as out:
            monitor = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=subprocess.DEVNULL)
        try:
            until(lambda: '"state": "busy"' in said.read_text(), "the monitor sees the ranks work")
            time.sleep(_SETTLE_S)
            before, began = cpu_s(monitor.pid), time.monotonic()
            time.sleep(seconds)
            share = 100 * (cpu_s(monitor.pid) - before) / (time.monotonic() - began)
            return share, rss_mb(monitor.pid)
        finally:
            monitor.terminate()
            monitor.wait(30)


def cpu_s(pid: int) -> float:
    """Of the process and the children it has waited for."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(int(word) for word in words[11:15]) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main(*(kind(word) for kind, word in zip((float, int), sys.argv[1:], strict=False))))
