"""Record how the real engine behaves, for the soak to draw from: ``python -m tests.slow.soak.record`` writes recorded.json.

The default model is served and given mixed traffic: short and long prompts, short and long answers, JSON schemas, rests.
Its black box is read every 20 ms. What is kept are durations in seconds: decode steps, prefill steps, silences between
two signs of progress while work was held, and the boot. The monitor watches with its own settings meanwhile: what it
declared and paged in these real minutes is kept as well.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from engine import default_model
from engine.blackbox import Snapshot
from monitors import daemon, fleet
from monitors.judge.progress import from_boxes
from tests.e2e.serving import Served, serving, wait_for

RECORDED = Path(__file__).parent / "recorded.json"
SECONDS = 200.0
_KEPT = 400
_WORDS = ("server", "batch", "queue", "page", "grows", "while", "counted", "gives", "back", "once", "more", "the", "a", "of", "takes")


def traffic(served: Served, stop: threading.Event, seed: int) -> None:
    """One client: asks, reads, rests."""
    rng = random.Random(seed)
    with httpx.Client(base_url=served.url, timeout=120) as client:
        while not stop.is_set():
            words = rng.choice((8, 40, 40, 300, 900))
            body: dict[str, Any] = {
                "prompt": f"{rng.random()} " + " ".join(rng.choices(_WORDS, k=words)),
                "max_tokens": rng.choice((8, 30, 30, 120)), "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            if rng.random() < 0.15:
                body |= {"regex": "(yes|no|perhaps){1,9}", "ignore_eos": False}
            with contextlib.suppress(httpx.HTTPError):
                client.post("/v1/completions", json=body)
            stop.wait(rng.expovariate(1 / 3))


def watch(served: Served, folder: Path, stop: threading.Event) -> list[str]:
    """The monitor's loop beside the traffic; the names of its events."""
    fleet_text = f'''[deployment.real]
engine = "lastbatch"
api = "{served.url}"
service = "embedded"
[[deployment.real.node]]
name = "a"
[[deployment.real.node.service]]
unit = "real"
ranks = [0]
log = "{served.log}"
run_dir = "{served.run_dir}"
'''
    whole = fleet.parse(fleet_text, "fleet.toml")
    events: list[str] = []
    options = daemon.Options(state_dir=folder / "state", bundle_root=folder / "bundles")
    daemon.run(whole, [whole.one()], options, lambda event: events.append(str(event["event"])), stop)
    return events


def main() -> None:
    model = default_model.path()
    decode: list[float] = []
    prefill: list[float] = []
    silences: list[float] = []
    with TemporaryDirectory() as scratch:
        begun = time.monotonic()
        with serving(model, Path(scratch), "--context-length", "2048", "--chunked-prefill-size", "512") as served:
            boot_s = time.monotonic() - begun
            stop = threading.Event()
            clients = [threading.Thread(target=traffic, args=(served, stop, seed)) for seed in range(3)]
            events: list[str] = []
            over = threading.Event()
            clients.append(threading.Thread(target=lambda: events.extend(watch(served, Path(scratch), over))))
            for client in clients:
                client.start()
            before: Snapshot | None = None
            sample = None
            moved_s = time.monotonic()
            until = moved_s + SECONDS
            while time.monotonic() < until:
                now = time.monotonic()
                box = served.box(0)
                latest = from_boxes(now, {0: box}, ended=False)
                if sample is None or latest.work != sample.work or not latest.held:
                    if sample is not None and sample.held and latest.work != sample.work:
                        silences.append(now - moved_s)
                    moved_s = now
                sample = latest
                if before is not None and box.host.step == before.host.step + 1:
                    spent = (box.host.progress_ns - before.host.progress_ns) / 1e9
                    counted = {k: box.host.counters[k] - before.host.counters[k] for k in ("batches_prefill", "batches_decode")}
                    if 0 < spent < 60 and counted["batches_decode"] == 1:
                        decode.append(spent)
                    elif 0 < spent < 60 and counted["batches_prefill"] == 1:
                        prefill.append(spent)
                before = box
                time.sleep(0.02)
            stop.set()
            for client in clients[:-1]:
                client.join(130)
            wait_for(lambda: served.box(0).host.held == 0, 60, "the server to come to rest")
            over.set()
            clients[-1].join(60)
            assert served.stop() == 0
    rng = random.Random(1)

    def kept(values: list[float]) -> list[float]:
        """A sample of them and always the longest."""
        chosen = rng.sample(values, min(_KEPT, len(values)))
        return sorted(round(value, 4) for value in {*chosen, *sorted(values)[-20:]})

    counted = {"decode": len(decode), "prefill": len(prefill), "silence": len(silences)}
    document = {
        "model": model.name, "seconds": SECONDS, "boot_s": round(boot_s, 1), "counted": counted,
        "watched": {"seconds": round(time.monotonic() - begun - boot_s), "looks_s": 0.5,
                    "stalls": events.count("stall_declared"), "pages": events.count("page")},
        "decode_s": kept(decode), "prefill_s": kept(prefill), "silence_s": kept(silences),
    }  # fmt: skip
    RECORDED.write_text(json.dumps(document) + "\n")
    print(f"{RECORDED}: {counted}, longest silence {max(silences):.2f} s, boot {boot_s:.1f} s")


if __name__ == "__main__":
    main()
