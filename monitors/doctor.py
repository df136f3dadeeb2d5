"""Prove now what a capture will need, node by node, and say the bound on the time to declare."""

from __future__ import annotations

import concurrent.futures
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monitors import engines, fleet
from monitors.capture import device
from monitors.capture.bundle import auth_headers
from monitors.judge.patience import Limits, bounds
from monitors.observe import boxes, metrics, process, rundir
from monitors.remote import NodeError, Remote

_DEADLINE_S = 40.0
_LEAST_FREE = 1 << 30
_MOST_OFFSET_S = 1.0


@dataclass(frozen=True)
class Proof:
    """``ok`` is None where something is absent that costs evidence and is no fault."""

    where: str
    name: str
    ok: bool | None
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def examine(whole: fleet.Fleet, deployment: fleet.Deployment) -> list[Proof]:
    """All proofs of one deployment, nodes in parallel. Never raises for what a node does."""
    found = [_disk(deployment), *_declares(deployment), _api(deployment), _paged(whole)]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(deployment.node))) as pool:
        for rows in pool.map(lambda node: _node(deployment, node), deployment.node):
            found.extend(rows)
    return found


def _node(deployment: fleet.Deployment, node: fleet.Node) -> list[Proof]:
    with Remote(node) as remote:
        began = time.monotonic()
        clock = device.facts(remote, deadline_s=10.0)
        if clock.value is None:
            remedy = "ssh to it by hand with BatchMode=yes: host key accepted? key without a passphrase? python3 on its PATH?"
            return [
                Proof(node.name, "reached", False, clock.reason, remedy if not remote.local else "is `python` right in the fleet file?")
            ]
        value = clock.value
        rows = [Proof(node.name, "reached", True, f"{'ssh' if not remote.local else 'this machine'}, {time.monotonic() - began:.2f} s")]
        far = abs(value.offset_s) > _MOST_OFFSET_S + value.within_s
        rows.append(Proof(node.name, "clock", not far, f"offset {value.offset_s:+.3f} s, within {value.within_s:.3f} s",
                          "run chrony or systemd-timesyncd on the node" if far else ""))  # fmt: skip
        pids = _ranks(deployment, node, remote)
        folders = [where for service in node.service if (where := rundir.find(remote, service, deployment.service).value)]
        asked = {
            "pids": pids, "units": [s.unit for s in node.service if s.log == "journal"], "py_spy": remote.py_spy,
            "logs": [s.log for s in node.service if s.log != "journal"],
            "folders": folders if engines.load(deployment.engine).black_box else [],
        }  # fmt: skip
        try:
            proofs = remote.collect("proofs", _DEADLINE_S, collector=device.COLLECTOR, **asked)
        except NodeError as error:
            return [*rows, Proof(node.name, "proofs", False, str(error), "the node answered and then did not: look at its load and disk")]
        return rows + [Proof(node.name, row["name"], row["ok"], row["text"], row["remedy"]) for row in proofs]


def _ranks(deployment: fleet.Deployment, node: fleet.Node, remote: Remote) -> list[int]:
    dialect = engines.load(deployment.engine)
    pids: list[int] = []
    for service in node.service if dialect.black_box else ():
        where = rundir.find(remote, service, deployment.service).value
        found = boxes.copy(remote, where, deadline_s=5.0, full=False).value if where else None
        pids += [box.snapshot.header.pid for box in found.boxes if box.state not in ("gone", "Z", "X")] if found else []
    if not dialect.black_box:
        table = process.sample(remote, dialect, [], deadline_s=8.0).value or ()
        pids = [row.pid for row in table if row.rank is not None]
    return pids


def _disk(deployment: fleet.Deployment) -> Proof:
    root = fleet.bundle_root(deployment)
    near = next((path for path in (root, *root.parents) if path.exists()), Path("/"))
    free = shutil.disk_usage(near).free
    return Proof("monitor", "disk for bundles", free >= _LEAST_FREE, f"{root}: {free / (1 << 30):.1f} GiB free",
                 "make room, or name another folder with bundle_dir" if free < _LEAST_FREE else "")  # fmt: skip


def _declares(deployment: fleet.Deployment) -> list[Proof]:
    """The bound on the time to declare, from what the engine exports."""
    dialect = engines.load(deployment.engine)
    watchdog = deployment.watchdog_s or dialect.watchdog_s
    found = bounds(dialect, Limits(watchdog_s=watchdog))
    text = ", ".join(f"at most {most:.0f} s after the last progress by {source.value}" for source, most in found.items())
    return [Proof("monitor", "time to declare", True, f"{text}; the watchdog's time is {watchdog:.0f} s")]


def _api(deployment: fleet.Deployment) -> Proof:
    page = metrics.fetch(f"{deployment.api}/metrics", deadline_s=5.0, headers=auth_headers(deployment))
    remedy = "start the server with its metrics enabled (SGLang: --enable-metrics), or see that api and api_key_file are right"
    return Proof("monitor", "metrics", page.value is not None, f"{len(page.value)} bytes" if page.value is not None else page.reason,
                 "" if page.value is not None else remedy)  # fmt: skip


def _paged(whole: fleet.Fleet) -> Proof:
    count = len(whole.page.urls)
    where = f"{count} address{'es' if count > 1 else ''}"  # a site may read the status page and the metrics instead: no fault
    return Proof("monitor", "page", count > 0 or None, f"{where}; `hang-monitor page --test` sends one" if count else "nobody is paged",
                 "" if count else "add urls to the [page] table of the fleet file")  # fmt: skip


def table(proofs: list[Proof]) -> str:
    """For a person: each failure with its remedy."""
    words: Mapping[bool | None, str] = {True: "ok  ", False: "FAIL", None: "none"}
    lines = []
    for proof in _folded(proofs):
        lines.append(f"{words[proof.ok]}  {proof.where:<10} {proof.name}: {proof.text}")
        if proof.remedy and proof.ok is not True:
            lines.append(f"                 -> {proof.remedy}")
    return "\n".join(lines)


def _folded(proofs: list[Proof]) -> list[Proof]:
    """What is absent from every rank in the same words is told once."""
    alike: dict[tuple[str, str, str], list[Proof]] = {}
    for proof in proofs:
        which = re.sub(r"\d+", "#", proof.name) if proof.ok is None else proof.name
        alike.setdefault((proof.where, which, proof.text), []).append(proof)
    return [
        replace(group[0], name=f"{group[0].name} and {len(group) - 1} more") if len(group) > 1 else group[0] for group in alike.values()
    ]
