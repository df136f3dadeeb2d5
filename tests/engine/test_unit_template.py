"""The packaged unit agrees with the engine's own times, so that the engine's watchdog and drain come first."""

from __future__ import annotations

import configparser
from pathlib import Path

from engine.config import Settings
from engine.launch import launcher

TEMPLATE = Path(launcher.__file__).with_name("lastbatch@.service")


def service() -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(TEMPLATE.read_text())
    return dict(parser["Service"])


def test_times_nest() -> None:
    unit, settings = service(), Settings()
    capture_s = launcher._STACKS_S
    assert settings.server.health_max_age_s < settings.launch.watchdog_timeout_s
    assert settings.launch.watchdog_timeout_s + capture_s < int(unit["WatchdogSec"])
    assert settings.server.drain_timeout_s + 2 * launcher._STOP_S < int(unit["TimeoutStopSec"])
    assert int(unit["TimeoutAbortSec"]) > launcher._STACKS_S + 2 * launcher._STOP_S
    assert int(unit["TimeoutStartSec"]) > launcher._EXTEND_S


def test_the_launcher_alone_is_told_to_stop_and_a_lost_group_starts_again() -> None:
    unit = service()
    assert unit["Type"] == "notify" and unit["KillMode"] == "mixed" and unit["WatchdogSignal"] == "SIGTERM"
    assert unit["Restart"] == "on-failure" and str(launcher.PEER_ENDED) not in unit["RestartPreventExitStatus"].split()
    assert unit["RuntimeDirectoryPreserve"] == "restart"


def test_nothing_in_it_keeps_a_monitor_from_the_processes() -> None:
    assert not {"SystemCallFilter", "PrivateUsers", "PrivatePIDs", "PrivateNetwork"} & set(service())
