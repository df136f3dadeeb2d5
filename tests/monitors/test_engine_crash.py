"""A crash of the real engine: found, judged with its traceback's own type and message, and not taken for a wedge."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx

from monitors import daemon, fleet
from monitors.capture import bundle
from monitors.judge.progress import Limits
from tests.e2e.serving import serving
from tests.monitors.cluster import fleet_text, until
from tests.tiny_models import tiny_model


def test_a_decode_that_raises_is_a_crash_with_its_exception_named(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", layers=2)
    events: list[dict[str, Any]] = []
    with serving(model, tmp_path, "--enable-faults", "--context-length", "256") as served:
        whole = fleet.parse(fleet_text([("a", served.run_dir, served.log)], served.url, ranks=1), "fleet.toml")
        watch = daemon.Watch(whole, whole.one(), daemon.Options(Limits(5.0), 0.1, tmp_path / "state", tmp_path / "bundles"), events.append)

        def turned(name: str) -> list[dict[str, Any]]:
            watch.turn()
            return [event for event in events if event["event"] == name]

        try:
            until(lambda: [e for e in turned("state") if e["state"] == "idle"], f"an idle server; {events}")
            served.arm("decode.crash:n=3")
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                served.complete(max_tokens=20)
            verdict = until(lambda: turned("verdict"), f"a verdict; {events}", 60)[-1]
        finally:
            watch.close()
    assert verdict["verdict"] == "crash", verdict
    assert any("TypeError" in item["text"] for item in verdict["evidence"] if item["for"]), verdict
    assert bundle.verify(Path(verdict["bundle"])).ok
    assert not [event for event in events if event["event"] == "stall_declared"]
