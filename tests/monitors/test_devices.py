"""GPUs looked at beside the watch. NVML itself is replaced here: a table of rows that the test writes."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitors import fleet, kept
from monitors.judge.power import Bands, Load
from monitors.observe import cards
from monitors.observe.devices import Devices
from monitors.remote import Remote
from tests.monitors.cluster import until


class Nvml:
    """What ``onnode.gpus`` answers."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {"reason": "NVML: Driver Not Loaded"}
        self.asked = 0

    def __call__(self, **_: Any) -> dict[str, Any]:
        self.asked += 1
        return self.answer

    def show(self, *rows: tuple[float, float, float]) -> None:
        self.answer = {"rows": [
            {"index": n, "uuid": f"GPU-{n}", "source": "nvml", "util": util, "mem_util": memory, "power_w": watts, "limit_w": 250.0}
            for n, (util, memory, watts) in enumerate(rows)
        ]}  # fmt: skip


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    monkeypatch.setattr(cards.onnode, "gpus", made)
    return made


@pytest.fixture
def devices(nvml: Nvml) -> Iterator[Devices]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool, Remote(fleet.Node(name="a")) as here:
        made = Devices({"a": here}, pool, Bands())
        yield made
        made.close()


def look(devices: Devices, nvml: Nvml, now: float, *, in_doubt: bool = False) -> None:
    """Ask at ``now`` and take the answer at the same moment."""
    before = nvml.asked
    devices.turn(now, in_doubt=in_doubt)
    until(lambda: nvml.asked > before, "NVML is asked")
    until(lambda: devices._nodes[0].here is not None and not devices._nodes[0].here.waiting, "the answer is there")
    devices.turn(now, in_doubt=in_doubt)


def test_bands_are_learned_and_a_spin_is_seen_beside_them(devices: Devices, nvml: Nvml) -> None:
    nvml.show((99, 45, 60), (98, 44, 61))  # a part whose work draws what a spin draws on others
    for n in range(30):
        look(devices, nvml, 10.0 * n)
        assert devices.learn(10.0 * n, Load.decode)
        assert not devices.learn(10.0 * n + 0.5, Load.decode), "a reading teaches once"
    assert devices.signs(290) == (False, True)
    nvml.show((100, 0, 25), (99, 44, 60))
    look(devices, nvml, 300)
    assert devices.signs(300) == (True, False)
    assert devices.signs(400) == (False, False), "old readings tell nothing of now"
    assert Bands.from_json(json.loads(json.dumps(devices.bands.to_json()))) == devices.bands


def test_a_machine_without_gpus_is_no_gap_and_one_that_lost_its_driver_is(devices: Devices, nvml: Nvml) -> None:
    look(devices, nvml, 0)
    assert devices.gaps == [] and devices.cards(0) == ()
    devices.turn(100, in_doubt=True)
    assert nvml.asked == 1, "it is not asked all the time"
    nvml.show((0, 0, 34))
    look(devices, nvml, 400)
    nvml.answer = {"reason": "NVML: GPU is lost"}
    look(devices, nvml, 410)
    assert "GPU is lost" in devices.gaps[0]


def test_in_doubt_the_gpus_are_asked_more_often(devices: Devices, nvml: Nvml) -> None:
    nvml.show((0, 0, 34))
    look(devices, nvml, 0)
    devices.turn(3, in_doubt=False)
    assert nvml.asked == 1
    look(devices, nvml, 3, in_doubt=True)
    assert nvml.asked == 2


def test_a_file_of_bands_that_was_cut_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "d.power.json"
    for text in ("", "{", "[]", '{"gpu": {"decode": 3}}', '{"gpu": {"sleep": []}}'):
        file.write_text(text)
        assert kept.bands(file) == Bands()
    whole = Bands({"gpu": {Load.idle: ((34.0, None),)}})
    file.write_text(json.dumps(whole.to_json()))
    assert kept.bands(file) == whole
