"""How fast a refused request is answered while streams run: ``python -m tests.engine.refusal_latency [--json]``.

The real API process under ``--grammar-backend none`` with a scripted scheduler that keeps ``--streams`` streams busy.
Prints p50, p99 and max in ms of a json_schema request's 400, without and with the streams. A figure to read, not a
test: it depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from engine.messages import Generate, Tokens
from tests.engine.api_process import Api, api_process

CONSTRAINED = {"messages": [{"role": "user", "content": "x" * 2000}], "response_format": {"type": "json_schema", "json_schema": {
    "name": "x", "schema": {"type": "object", "properties": {f"field{n}": {"type": "string"} for n in range(20)}}}}}  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens-per-s", type=float, default=30.0, help="of each stream")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, api_process(Path(folder), "--grammar-backend", "none") as api:
        figures = {"idle": _refusals(api, options.requests)}
        stop = threading.Event()
        api.scheduler.script = _endless(api, 1 / options.tokens_per_s, stop)
        streams = [threading.Thread(target=_read, args=(api.url,)) for _ in range(options.streams)]
        for stream in streams:
            stream.start()
        api.scheduler.wait_for(lambda: len(api.scheduler.requests) == options.streams, "the streams", 20)
        process = psutil.Process(api.process.pid)
        before, since = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(2)
        share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - since)
        figures["under load"] = _refusals(api, options.requests)
        stop.set()
        for stream in streams:
            stream.join(20)
    if options.json:
        print(json.dumps({**figures, "api_cpu_share": share}))
        return 0
    for name, figure in figures.items():
        print(f"{name:12} " + "  ".join(f"{key} {value:7.2f} ms" for key, value in figure.items()))
    print(f"{options.streams} streams of {options.tokens_per_s:g} tok/s take {100 * share:.0f} % of a core in the API process")
    return 0


def _refusals(api: Api, count: int) -> dict[str, float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        assert api.client.post("/v1/chat/completions", json=CONSTRAINED).status_code == 400
        times.append((time.perf_counter() - started) * 1000)
    times.sort()
    return {"p50": times[count // 2], "p99": times[int(count * 0.99)], "max": times[-1]}


def _endless(api: Api, interval_s: float, stop: threading.Event):  # type: ignore[no-untyped-def]
    def script(request: Generate) -> Iterator[Tokens | None]:
        due = time.monotonic()
        while not stop.is_set():
            due += interval_s
            while time.monotonic() < due:
                yield None
            yield api.scheduler.tokens(request, [70])
        yield api.scheduler.tokens(request, [], finish="length")

    return script


def _read(url: str) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=60) as answer:
        for _ in answer.iter_bytes():
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
