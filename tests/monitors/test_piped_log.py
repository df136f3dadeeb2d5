"""``log = "-"``: a follower's output is piped into the monitor's command."""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.monitors.cluster import ROOT, until

LINE = "INFO 03-01 10:00:{:02d} [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 9.5 tokens/s, Running: 2 reqs, Waiting: 1 reqs, GPU KV cache usage: 1.0%\n"  # noqa: E501


def test_lines_that_are_piped_in_are_judged_and_the_end_of_the_pipe_is_told(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[deployment.v]\nengine = "vllm"\napi = "http://127.0.0.1:9"\nservice = "embedded"\n[[deployment.v.node]]\nname = "a"\n'
                    '[[deployment.v.node.service]]\nunit = "v"\nlog = "-"\nranks = [0]\n')  # fmt: skip
    argv = [sys.executable, "-m", "monitors.cli", "run", "--fleet", str(file), "--poll-s", "0.1", "--state-dir", str(tmp_path), "--json"]
    monitor = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert monitor.stdin is not None and monitor.stdout is not None
    told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: [told.put(json.loads(line)) for line in monitor.stdout or ()])
    reader.start()
    seen: list[dict[str, Any]] = []

    def heard(event: str, word: str) -> bool:
        while not told.empty():
            seen.append(told.get())
        return any(one["event"] == event and word in json.dumps(one) for one in seen)

    try:
        second = itertools.cycle(range(60))

        def speak() -> bool:
            assert monitor.stdin is not None
            monitor.stdin.write(LINE.format(next(second)))
            monitor.stdin.flush()
            return heard("state", "busy")

        until(lambda: (heard("gap", "refused"), speak())[1], f"the state of a busy server; {seen}")
        monitor.stdin.close()
        until(lambda: heard("gap", "pipe has ended"), f"the end of the pipe; {seen}")
    finally:
        monitor.terminate()
        assert monitor.wait(30) == 0
        reader.join()
        monitor.stdout.close()
