"""The zone of a log's times, where the capture knows it: the bundled engine writes its node's local time.

What it cannot see: a service that was given a zone of its own. Another engine may run in a container whose zone is not the
node's, so its times stay assumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from monitors.engines import Dialect
from monitors.judge.moment import Moment
from monitors.judge.scene import Access, BatchLine, Log, Notice

_Line = TypeVar("_Line", BatchLine, Notice, Access)


def of_bundle(folder: Path, dialect: Dialect) -> dict[str, int]:
    """Seconds that each log's times are ahead of UTC, by artefact; empty where no manifest says so."""
    if not dialect.black_box:
        return {}
    try:
        raw = json.loads((folder / "manifest.json").read_text())
        return {item["path"]: int(raw["clocks"][item["node"]]["zone_s"]) for item in raw["items"]
                if item["outcome"] == "taken" and "zone_s" in raw["clocks"].get(item["node"], {})}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def known(log: Log, zones: Mapping[str, int]) -> Log:
    """A log with its times in UTC, where its zone is known."""
    if log.artefact not in zones:
        return log
    ahead_s = zones[log.artefact]

    def each(lines: tuple[_Line, ...]) -> tuple[_Line, ...]:
        return tuple(replace(line, moment=_told(line.moment, ahead_s)) for line in lines)

    return replace(log, batches=each(log.batches), notices=each(log.notices), accesses=each(log.accesses), last=_told(log.last, ahead_s))


def _told(moment: Moment | None, ahead_s: int) -> Moment | None:
    return moment if moment is None or moment.zone else replace(moment, unix_s=moment.unix_s - ahead_s, zone=True)
