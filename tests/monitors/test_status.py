"""The status page, its metrics, the packaged dashboards and silences."""

from __future__ import annotations

import json
import re
import urllib.request
from importlib import resources
from pathlib import Path

from monitors import silences, status
from monitors.silences import Silence
from monitors.trail import Trail

ONE = {"deployment": "flash<b>", "state": "stalled", "held": 2.0, "quiet_s": 7.5, "gaps": ["node b: ssh"], "looked_utc": "now",
       "incident": {"kind": "wedge", "verdict": "hang_unknown", "bundle": "/b"}}  # fmt: skip


def test_the_page_refreshes_itself_draws_curves_and_escapes_what_it_shows() -> None:
    trail = Trail()
    for second in range(5):
        trail.add(float(second), 1e9 + second, "busy", 1.0, 0.0, second * 10)
    trail.add(4.2, 1e9, "busy", 1.0, 0.0, 99)  # less than a second later: not kept
    assert [sample["steps_per_s"] for sample in trail.samples()] == [0.0, 10.0, 10.0, 10.0, 10.0]
    server = status.StatusServer(0, lambda: [{**ONE, "trail": trail.samples()}], {"page": 1})
    try:
        asked = urllib.request.Request(f"http://127.0.0.1:{server.port}/", headers={"Accept": "text/html"})
        with urllib.request.urlopen(asked, timeout=5) as answer:
            text = answer.read().decode()
        assert 'http-equiv="refresh"' in text and text.count("<polyline") == 3 and "flash&lt;b&gt;" in text and "<b>" not in text
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=5) as answer:
            assert json.load(answer)["deployments"][0]["state"] == "stalled"
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
            page = answer.read().decode()
        assert 'hang_monitor_state{deployment="flash<b>",state="stalled"} 1' in page and "hang_monitor_incident_open" in page
    finally:
        server.close()


def test_dashboard_and_alert_rules_name_only_metrics_that_exist() -> None:
    files = resources.files("monitors.packaging")
    texts = [(files / name).read_text() for name in ("grafana.json", "alerts.yaml")]
    assert json.loads(texts[0])["panels"]
    served = set(re.findall(r"^(hang_monitor_\w+)", status.prometheus([ONE], {"x": 1}).replace("# TYPE ", ""), re.M))
    named = {name for text in texts for name in re.findall(r"hang_monitor_\w+", text)}
    assert named and named <= served, named - served


def test_a_silence_has_an_end_and_a_file_that_was_cut_silences_nothing(tmp_path: Path) -> None:
    file = tmp_path / "silences.json"
    silences.save(file, [Silence("fl*", "hang_*", 100.0, "ann", "known"), Silence("x", "*", 5.0, "bob", "")], 10.0)
    found = silences.load(file)
    assert [one.who for one in found] == ["ann"]
    assert silences.active(found, "flash", "hang_unknown", 99.0) == found[0]
    assert silences.active(found, "flash", "hang_unknown", 100.0) is None
    assert silences.active(found, "flash", "crash", 50.0) is None and silences.active(found, "other", "hang_unknown", 50.0) is None
    file.write_text(file.read_text()[:20])
    assert silences.load(file) == []
