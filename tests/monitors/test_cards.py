"""All of NVML's readings: real pynvml over the C interface of a fake library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monitors import fleet
from monitors.judge.power import Bands, Seen, look
from monitors.observe import cards
from monitors.remote import Remote
from tests.monitors.cluster import ROOT, until

HERE = Path(__file__).parent


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the fake library reads; the library is first on the loader's path of every child process."""
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(HERE / "fake_nvml.c")], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "cards"))
    return tmp_path / "cards"


def sample() -> tuple[cards.Card, ...]:
    with Remote(fleet.Node(name="a")) as here:
        reading = cards.sample(here, deadline_s=10)
    assert reading.value is not None, reading.reason
    return reading.value


def test_every_quantity_is_read_and_what_is_not_there_has_nvmls_reason(nvml: Path) -> None:
    nvml.write_text("100 1 95000 250000 0\n100 40 250000 250000 0\n")
    spinning, hot = sample()
    assert (spinning.uuid, spinning.util, spinning.mem_util, spinning.power_w, spinning.limit_w) == ("GPU-fake-0", 100, 1, 95, 250)
    assert (spinning.sm_mhz, spinning.mem_mhz, spinning.pcie_tx_mb_s, spinning.pcie_rx_mb_s) == (1980, 2619, 2, 4)
    assert spinning.temperature_c is None and "ot" in spinning.gaps["temperature_c"]
    assert spinning.throttle == () and hot.throttle == ("thermal, by software",)
    assert look(Bands(), spinning.draw) is Seen.spinning
    assert look(Bands(), hot.draw) is Seen.unclear, "its clocks are held down"


def test_a_card_that_is_lost_is_a_row_of_gaps(nvml: Path) -> None:
    nvml.write_text("100 1 95000 250000 15\n100 2 96000 250000 0\n")
    lost, fine = sample()
    assert lost.util is None and {"rates", "power_w", "throttle_bits", "sm_mhz"} <= set(lost.gaps)
    assert look(Bands(), lost.draw) is Seen.unclear and fine.util == 100


def test_this_machines_cards_are_read_beside_the_watch(nvml: Path) -> None:
    nvml.write_text("7 3 60000 250000 0\n")
    program = (
        "import json, time\nfrom monitors.observe.cards import Here\nhere = Here('a')\nhere.ask()\nfound = None\n"
        "until = time.monotonic() + 10\nwhile found is None and time.monotonic() < until:\n    time.sleep(0.01)\n    found = here.poll()\n"
        "here.close()\nprint(json.dumps([found.value[0].util, found.value[0].name, here.poll() is None]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=30, check=True)
    assert json.loads(done.stdout) == [7, "Fake card 0", True]


def test_errors_of_the_driver_are_told_once(nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.write_text("7 3 60000 250000 0\n")
    monkeypatch.setenv("FAKE_XID", str(tmp_path / "xid"))
    program = (
        "import json, pathlib, time\nfrom monitors.observe.cards import Here\nhere = Here('a')\ntold = []\n"
        "def ask():\n    here.ask()\n    until = time.monotonic() + 10\n"
        "    while here.poll() is None and time.monotonic() < until:\n        time.sleep(0.01)\n    told.append(here.xids())\n"
        f"ask()\npathlib.Path({str(tmp_path / 'xid')!r}).write_text('79 31')\nask()\nask()\nhere.close()\nprint(json.dumps(told))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=30, check=True)
    assert json.loads(done.stdout) == [[], [[0, 31], [0, 79]], []]


def test_a_library_that_fails_in_an_unknown_way_is_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> dict[str, Any]:
        raise RuntimeError("the driver went away")

    monkeypatch.setattr(cards.onnode, "gpus", broken)
    here = cards.Here("a")
    here.ask()
    reading = until(here.poll, "the answer")
    here.close()
    assert reading.value is None and "the driver went away" in reading.reason
