"""The probes of the machine under the ranks: clocks and tools, the kernel's words, the network, NCCL, device core dumps."""

from __future__ import annotations

import json

from monitors.capture import device
from monitors.capture import nccl as asking
from monitors.capture.field import Field, on_nodes
from monitors.capture.manifest import Outcome, utc
from monitors.fleet import Node


def clocks_and_tools(f: Field, deadline_s: float) -> None:
    """Clock offsets and tool versions, into the manifest's head."""
    clocks: dict[str, object] = {}
    tools: dict[str, object] = {}

    def take(node: Node) -> None:
        start = utc()
        found = device.facts(f.remotes[node.name], deadline_s=deadline_s)
        if found.value is None:
            f.writer.miss("node_clock", "failed", found.reason, start=start, node=node.name)
            return
        with f.lock:
            clocks[node.name] = found.value.to_json()
            tools[node.name] = found.value.tools
            f.writer.describe(clocks=dict(sorted(clocks.items())), tools=dict(sorted(tools.items())))

    on_nodes(f, take)


def kernel(f: Field, deadline_s: float) -> None:
    def take(node: Node) -> None:
        start = utc()
        remote = f.remotes[node.name]
        said = device.kernel(remote, deadline_s=deadline_s)
        if said.value is None:
            f.writer.miss("kernel", "failed", said.reason, start=start, node=node.name)
        elif said.value:
            f.add_text(f"device/dmesg-{node.name}.txt", said.value, probe="kernel", start=start, node=node.name)
        start = utc()
        net = device.network(remote, deadline_s=deadline_s)
        if net.value is None:
            f.writer.miss("network", "failed", net.reason, start=start, node=node.name)
        else:
            f.add_text(f"device/network-{node.name}.json", net.value, probe="network", start=start, node=node.name)

    on_nodes(f, take)


def nccl(f: Field, deadline_s: float) -> None:
    def take(node: Node) -> None:
        ranks = {who: pid for who, pid in f.pids.get(node.name, {}).items() if who.isdigit()}
        if not ranks:
            f.writer.miss("flight_recorder", "skipped", "no rank is known on this node", node=node.name)
            return
        remote, start = f.remotes[node.name], utc()
        dumps = asking.flight(remote, ranks, deadline_s=deadline_s / 2)
        for who in ranks:
            row = (dumps.value or {}).get(who, {"reason": dumps.reason, "enabled": True})
            if "data" in row:
                note = f"{row['of']}, {row['seconds']:.2f} s after it was asked for"
                f.writer.add(f"fr-{who}.bin", row["data"], probe="flight_recorder", start=start, node=node.name, rank=int(who), note=note)
            else:
                how: Outcome = "failed" if row["enabled"] else "skipped"
                f.writer.miss("flight_recorder", how, row["reason"], start=start, node=node.name, rank=int(who))
        start = utc()
        said = asking.ras(remote, ranks, deadline_s=deadline_s / 2)
        row = said.value or {"reason": said.reason, "enabled": True}
        if "text" in row:
            f.add_text(f"ncclras.{node.name}.txt", row["text"], probe="ras", start=start, node=node.name, note=row["address"])
        else:
            f.writer.miss("ras", "failed" if row["enabled"] else "skipped", row["reason"], start=start, node=node.name)

    on_nodes(f, take)


def core_dump(f: Field, deadline_s: float) -> None:

    def take(node: Node) -> None:
        start = utc()
        ranks = {who: pid for who, pid in f.pids.get(node.name, {}).items() if who.isdigit()}
        if not ranks:
            f.writer.miss("cuda_core_dump", "failed", "no rank is known on this node", start=start, node=node.name)
            return
        found = device.core_dump(f.remotes[node.name], list(ranks.values()), deadline_s=deadline_s)
        rows = {}
        for who, pid in ranks.items():
            answer = (found.value or {}).get(pid, {"reason": found.reason})
            rows[who] = answer
            if "reason" in answer:
                f.writer.miss("cuda_core_dump", "failed", answer["reason"], start=start, node=node.name, rank=int(who))
        if any("file" in row for row in rows.values()):
            text = json.dumps(rows, indent=1)
            f.add_text(f"device/cuda-core-{node.name}.json", text, probe="cuda_core_dump", start=start, node=node.name)

    on_nodes(f, take)
