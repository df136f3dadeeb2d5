"""GPU readings: NVML or nvidia-smi on a node, tables in files, and a simulated source for machines without a GPU.

The simulated source is named so in every output. It is derived from the black box and nothing else: a collective
that was entered and has not completed reads as a kernel that spins, a computing stream as work, else idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from engine.blackbox import DeviceState, Snapshot
from monitors.judge.scene import SIMULATED, Cite, Gpu
from monitors.observe.reading import Reading, gap
from monitors.remote import NodeError, Remote

_LIMIT_W = 250.0
_SIMULATED = {  # state of the stream -> utilisation, memory utilisation, power
    DeviceState.collective: (100.0, 1.0, 95.0),
    DeviceState.compute: (100.0, 55.0, 220.0),
    DeviceState.idle: (0.0, 0.0, 34.0),
}
COLUMNS = ("node", "index", "name", "utilization.gpu [%]", "utilization.memory [%]", "power.draw [W]", "power.limit [W]", "source")
# A part without a power cap prints N/A for it, and one with unified memory "Not Supported" for its memory.
_TABLE_ROW = re.compile(r"(?P<power>\d{1,6}|N/A|\?)W?\s*/\s*(?P<limit>\d{1,6}|N/A)W?\s[^|]{0,80}\|[^|]{0,80}\|\s*(?P<util>\d{1,3}|N/A)%?\s")
_ROCM_ROW = re.compile(r"^(?P<index>\d{1,3})\s.*?\s(?P<power>\d{1,4}(?:\.\d+)?)W\s.*?(?P<util>\d{1,3}(?:\.\d+)?)%\s*$")
_TABLE_HEAD = re.compile(r"^\|\s+(?P<index>\d+)\s+\S")


def simulate(snapshot: Snapshot, node: str) -> Gpu:
    """What a GPU would show in the state that a rank's stream is in. The index is the rank."""
    util, mem_util, power = _SIMULATED[snapshot.device.state]
    return Gpu(node, snapshot.header.rank, util, mem_util, power, _LIMIT_W, SIMULATED)


def sample(remote: Remote, *, deadline_s: float) -> Reading[tuple[Gpu, ...]]:
    """All GPUs of a node. A quantity that cannot be read is None in its row."""
    try:
        answer = remote.collect("gpus", deadline_s)
    except NodeError as error:
        return gap(str(error))
    if "reason" in answer:
        return gap(answer["reason"])
    return Reading(tuple(
        Gpu(remote.name, row["index"], row.get("util"), row.get("mem_util"), row.get("power_w"), row.get("limit_w"), row["source"])
        for row in answer["rows"]
    ))  # fmt: skip


def to_csv(gpus: Iterable[Gpu]) -> str:
    def cell(value: float | None, unit: str) -> str:
        return "[N/A]" if value is None else f"{value:.2f} {unit}" if unit == "W" else f"{value:.0f} {unit}"

    rows = [", ".join(COLUMNS)]
    for g in gpus:
        name = "simulated from the black box" if g.source == SIMULATED else "GPU"
        cells = (cell(g.util, "%"), cell(g.mem_util, "%"), cell(g.power_w, "W"), cell(g.limit_w, "W"))
        rows.append(", ".join((g.node, str(g.index), name, *cells, g.source)))
    return "\n".join(rows) + "\n"


def from_csv(text: str, artefact: str) -> tuple[Gpu, ...]:
    """A table with a header as nvidia-smi writes it, or with names that say the same. Of several rows for one GPU the
    last counts."""
    lines = text.splitlines()
    if not lines:
        return ()
    header = [cell.strip() for cell in lines[0].split(",")]
    found: dict[tuple[str, int], Gpu] = {}
    for number, line in enumerate(lines[1:], 2):
        cells = dict(zip(header, (cell.strip() for cell in line.split(",")), strict=False))
        index = _number(_pick(cells, "index", "gpu", "gpu_index", "device"))
        util = _number(_pick(cells, "utilization.gpu", "gpu_use_percent", "gpu_util", "util", "sm", "sm_util"))
        mem_util = _number(_pick(cells, "utilization.memory", "mem_use_percent", "mem_util"))
        power = _number(_pick(cells, "power.draw", "power.draw.instant", "power.draw.average", "average_power_w", "power_w", "power"))
        limit = _number(_pick(cells, "power.limit", "enforced.power.limit", "power_limit_w", "power_cap_w"))
        gpu = Gpu(cells.get("node", ""), int(index or 0), util, mem_util, power, limit, cells.get("source", ""), Cite(artefact, number))
        if gpu.util is not None or gpu.power_w is not None:
            found[gpu.node, gpu.index] = gpu
    return tuple(found.values())


def from_table(text: str, artefact: str) -> tuple[Gpu, ...]:
    """The boxed table that a bare ``nvidia-smi`` prints."""
    found: list[Gpu] = []
    index = 0
    for number, line in enumerate(text.splitlines(), 1):
        head = _TABLE_HEAD.match(line)
        index = int(head["index"]) if head else index
        row = _TABLE_ROW.search(line)
        if row:
            util, power, limit = (_number(row[name]) for name in ("util", "power", "limit"))
            found.append(Gpu("", index, util, None, power, limit, "nvidia-smi", Cite(artefact, number)))
            continue
        other = _ROCM_ROW.match(line)
        if other:
            power, util = float(other["power"]), float(other["util"])
            found.append(Gpu("", int(other["index"]), util, None, power, None, "rocm-smi", Cite(artefact, number)))
    return tuple(found)


def _pick(cells: dict[str, str], *names: str) -> str:
    return next((value for key, value in cells.items() for name in names if key.split(" [")[0] == name), "")


def _number(text: str) -> float | None:
    found = re.match(r"-?\d{1,12}(?:\.\d{1,12})?", text)
    return float(found[0]) if found else None
