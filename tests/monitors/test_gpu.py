"""GPU readings: real pynvml over the C interface of a fake library, tables in files, and the simulated source."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.blackbox import BlackBox, Header
from engine.blackbox import read as read_box
from monitors import fleet
from monitors.judge.machine import describe
from monitors.judge.scene import SIMULATED
from monitors.observe import gpu
from monitors.remote import Remote

HERE = Path(__file__).parent


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the fake library reads; the library is first on the loader's path of every child process."""
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(HERE / "fake_nvml.c")], check=True)
    cards = tmp_path / "cards"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("FAKE_NVML", str(cards))
    return cards


def sample() -> tuple[gpu.Gpu, ...]:
    with Remote(fleet.Node(name="a")) as here:
        reading = gpu.sample(here, deadline_s=10)
    assert reading.value is not None, reading.reason
    return reading.value


def test_nvml_readings_reach_the_monitor_and_follow_the_device(nvml: Path) -> None:
    nvml.write_text("100 1 95000 250000 0\n0 0 34100 250000 0\n")
    spinning, idle = sample()
    assert (spinning.util, spinning.mem_util, spinning.power_w, spinning.limit_w, spinning.source) == (100, 1, 95.0, 250.0, "nvml")
    assert spinning.spinning and idle.idle and not idle.spinning
    nvml.write_text("98 60 230000 250000 0\n")
    (working,) = sample()
    assert not working.spinning and not working.idle


def test_a_reading_that_fails_is_a_gap_in_its_row_and_not_the_end(nvml: Path) -> None:
    nvml.write_text("100 1 95000 250000 15\n100 2 96000 250000 0\n")
    lost, fine = sample()
    assert lost.util is None and lost.power_w is None
    assert fine.util == 100


def test_a_machine_without_nvml_gives_the_reason() -> None:
    with Remote(fleet.Node(name="a")) as here:
        reading = gpu.sample(here, deadline_s=10)
    if reading.value is None:  # a test machine with a GPU has nothing to show here
        assert "NVML" in reading.reason


def test_the_simulated_source_follows_the_black_box_and_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "rank-2.box"
    box = BlackBox(path, Header(1, 2, 3, "d"))
    assert gpu.simulate(read_box(path), "a").idle
    box.device_begin(1)
    working = gpu.simulate(read_box(path), "a")
    assert working.util == 100 and not working.spinning
    box.collective_enqueued(1, 1, 64)
    spinning = gpu.simulate(read_box(path), "a")
    box.close()
    assert spinning.spinning and spinning.source == SIMULATED and spinning.index == 2
    assert "simulated" in describe([spinning])
    (again,) = gpu.from_csv(gpu.to_csv([spinning]), "gpu.csv")
    assert (again.util, again.power_w, again.limit_w, again.source) == (100, 95, 250, "simulated")


def test_the_table_of_a_bare_nvidia_smi_is_read() -> None:
    text = (
        "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |                    0 |\n"
        "| N/A   34C    P0             119W /  700W |   71207MiB /  81559MiB |    100%      Default |\n"
    )
    (card,) = gpu.from_table(text, "nvidia-smi.txt")
    assert (card.util, card.power_w, card.limit_w) == (100, 119, 700) and card.spinning
