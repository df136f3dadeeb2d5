"""``opsctl watch`` on a real status page."""

from __future__ import annotations

import io
import json

from monitors import status
from opsctl.cli import main
from opsctl.watch import bars


def watch(url: str, *words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(["watch", "--url", url, *words], {}, stdout=out, stderr=err)
    return int(code), out.getvalue(), err.getvalue()


def test_the_status_page_is_shown_in_a_terminal_and_as_json() -> None:
    one = {"deployment": "flash", "state": "stalled", "held": 2.0, "quiet_s": 7.5, "gaps": ["node b: ssh"],
           "trail": [{"steps_per_s": 4.0, "held": 1.0}, {"steps_per_s": 0.0, "held": 2.0}]}  # fmt: skip
    server = status.StatusServer(0, lambda: [one], {})
    try:
        url = f"http://127.0.0.1:{server.port}"
        code, text, _ = watch(url, "--once")
        assert code == 0 and "flash" in text and "stalled" in text and "gap: node b: ssh" in text
        assert json.loads(watch(url, "--json")[1])["data"]["deployments"][0]["deployment"] == "flash"
    finally:
        server.close()
    code, _, talk = watch(url, "--once")
    assert code == 7 and "is hang-monitor running" in talk


def test_a_curve_fits_a_line() -> None:
    assert bars([0, 1, 2]) == " ▄█" and len(bars(list(range(100)))) == 30
