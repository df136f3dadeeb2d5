"""Bands of power: learned from quiet running, kept, and read beside. The watts are those of real reports."""

from __future__ import annotations

import json

import pytest

from monitors.judge.power import Bands, Draw, Load, Seen, all_seen, learn, look


def taught(idle_w: float, decode_w: float, prefill_w: float, *, traffic: float | None = 45.0, limit_w: float | None = 250.0) -> Bands:
    bands = Bands()
    for n in range(60):
        wave = 1 + 0.04 * ((n % 7) - 3) / 3
        memory = None if traffic is None else traffic + n % 5
        bands = learn(bands, [Draw("gpu", 0.0, 0.0, idle_w * wave, limit_w)], Load.idle)
        bands = learn(bands, [Draw("gpu", 99.0, memory, decode_w * wave, limit_w)], Load.decode)
        bands = learn(bands, [Draw("gpu", 100.0, None if memory is None else memory - 20, prefill_w * wave, limit_w)], Load.prefill)
    return bands


@pytest.mark.parametrize(
    ("bands", "draw", "seen"),
    [
        (taught(34, 210, 240), Draw("gpu", 100, 1, 97, 250), Seen.spinning),
        (taught(34, 210, 240), Draw("gpu", 100, 47, 208, 250), Seen.working),
        (taught(70, 330, 520, limit_w=700), Draw("gpu", 100, 0, 119, 700), Seen.spinning),
        # A part whose work draws what a spin draws on others: absolute watts would call its decode a spin.
        (taught(9, 45, 60, limit_w=350), Draw("gpu", 96, 44, 46, 350), Seen.working),
        (taught(9, 45, 60, limit_w=350), Draw("gpu", 96, 0, 20, 350), Seen.spinning),
        # A spin within the band of work: only the memory is still.
        (taught(40, 100, 240), Draw("gpu", 100, 0, 101, 250), Seen.spinning),
        (taught(34, 210, 240), Draw("gpu", 3, 0, 36, 250), Seen.idle),
        (taught(34, 210, 240), Draw("gpu", None, None, None, 250), Seen.unclear),
        # A throttled card draws little at work.
        (taught(34, 210, 240), Draw("gpu", 100, 40, 110, 250, held_down=True), Seen.unclear),
        (taught(50, 210, 240, traffic=None), Draw("gpu", 100, None, 95, 250), Seen.spinning),
    ],
)
def test_a_reading_is_compared_with_the_gpus_own_past(bands: Bands, draw: Draw, seen: Seen) -> None:
    assert look(bands, draw) is seen


def test_absolute_watts_are_the_fallback_before_enough_is_learned() -> None:
    assert look(Bands(), Draw("gpu", 100, 1, 95, 250)) is Seen.spinning
    assert look(Bands(), Draw("gpu", 100, 60, 230, 250)) is Seen.working
    assert look(Bands(), Draw("gpu", 100, 60, 95, 250)) is Seen.unclear, "memory moves: it may work at low power"
    few = learn(Bands(), [Draw("gpu", 100, 60, 95, 250)] * 3, Load.decode)
    assert look(few, Draw("gpu", 100, 60, 95, 250)) is Seen.unclear


def test_one_gpu_that_spins_speaks_for_the_deployment() -> None:
    bands = taught(34, 210, 240)
    spinning, working, idle = Draw("gpu", 100, 1, 97, 250), Draw("gpu", 100, 47, 208, 250), Draw("gpu", 0, 0, 34, 250)
    assert all_seen(bands, [spinning, idle]) == (True, False)
    assert all_seen(bands, [working, idle]) == (False, True)
    assert all_seen(bands, [spinning, working]) == (True, False)
    assert all_seen(bands, [idle]) == (False, False)


def test_bands_come_back_from_disk_as_they_were_and_do_not_grow_without_end() -> None:
    bands = taught(34, 210, 240)
    for _ in range(1000):
        bands = learn(bands, [Draw("gpu", 99, 45, 211, 250)], Load.decode)
    text = json.dumps(bands.to_json())
    assert len(text) < 20_000
    again = Bands.from_json(json.loads(text))
    assert again == bands
    assert again.band("gpu", Load.decode) is not None and again.band("other", Load.decode) is None


def test_readings_that_say_nothing_teach_nothing() -> None:
    none = [Draw("gpu", 100, 50, None, 250), Draw("gpu", 100, 50, 90, 250, held_down=True), Draw("gpu", 10, 2, 60, 250)]
    assert learn(Bands(), none * 50, Load.decode) == Bands()
