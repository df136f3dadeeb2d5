"""The probes of a capture, cheap to invasive. A probe is a declaration; deadlines and order are the runner's.

Each probe goes to all nodes in parallel and hands every artefact to the writer as soon as it has it, so that what one
node has given is safe while another still answers. A node that does not answer is a named gap, and no other waits for it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence

from monitors.capture import machine
from monitors.capture.field import Field, Probe, Rows, everywhere, on_nodes
from monitors.capture.manifest import utc
from monitors.fleet import Node, Service
from monitors.judge.scene import Process
from monitors.observe import boxes, gpu, journal, logfile, metrics, probe, process, rundir, stacks

_LOG_BYTES = 4 << 20
_JOURNAL_LINES = 5000
_SECOND_SAMPLE_S = 3.0


def _black_boxes(f: Field, deadline_s: float) -> None:
    if not f.dialect.black_box:
        f.writer.miss("black_box", "skipped", f"{f.dialect.name} writes no black box")
        return
    began = utc()
    clocks = Rows(lambda node, rows: f.writer.add(f"clocks-{node}.json", _clocks(rows), probe="clocks", start=began, node=node))

    def take(node: Node, service: Service) -> None:
        start = utc()
        remote = f.remotes[node.name]
        where = rundir.find(remote, service, f.deployment.service, deadline_s=deadline_s)
        reading = boxes.copy(remote, where.value, deadline_s=deadline_s) if where.value else None
        found = reading.value if reading else None
        if found is None:
            f.writer.miss("black_box", "failed", reading.reason if reading else where.reason, start=start, node=node.name)
            return
        for why in found.unreadable:
            f.writer.miss("black_box", "failed", why, start=start, node=node.name)
        for box in found.boxes:
            f.writer.add(f"rank-{box.rank}.box", box.data, probe="black_box", start=start, node=node.name, rank=box.rank)
            f.know(node.name, str(box.rank), box.snapshot.header.pid)
            f.simulated.append(gpu.simulate(box.snapshot, node.name))
        if not found.boxes and not found.unreadable:
            f.writer.miss("black_box", "failed", f"{where.value} holds no black box", start=start, node=node.name)
        for key, who in (("pid", "launcher"), ("api_pid", "api")):
            pid = (found.launcher or {}).get(key)
            if isinstance(pid, int):
                f.know(node.name, f"{who}_{node.name}", pid)
        clock = {"mono_ns": found.clock.mono_ns, "unix_ns": found.clock.unix_ns, "ranks": [box.rank for box in found.boxes]}
        clocks.add(node.name, [(f"{node.name}/{service.unit}", {"node": node.name, **clock})])

    everywhere(f, take)
    if found := clocks.done():
        f.writer.add("clocks.json", _clocks(found), probe="clocks", start=began)


def _clocks(rows: Sequence[tuple[str, object]]) -> bytes:
    return json.dumps(dict(rows), indent=1).encode()


def _logs(f: Field, deadline_s: float) -> None:
    first = f.services()[0][1].unit if f.services() else ""

    def take(node: Node, service: Service) -> None:
        start = utc()
        remote = f.remotes[node.name]
        # The first service's log bears the plain name that every reader of a case folder knows.
        tag = "" if service.unit == first and node is f.deployment.node[0] else f".{node.name}-{service.unit.split('.')[0]}"
        if service.log == "journal":
            found, path = journal.tail(remote, service.unit, lines=_JOURNAL_LINES, deadline_s=deadline_s), f"journal{tag}.jsonl"
        else:
            found, path = logfile.tail(remote, service.log, limit=_LOG_BYTES, deadline_s=deadline_s), f"server{tag}.log"
        if found.value is None:
            f.writer.miss("log", "failed", found.reason, start=start, node=node.name)
        else:
            f.add_text(path, found.value.decode(errors="replace"), probe="log", start=start, node=node.name)

    everywhere(f, take)


def _server(f: Field, deadline_s: float) -> None:
    each = deadline_s / (2 + len(f.dialect.health))
    start = utc()
    page = metrics.fetch(f"{f.deployment.api}/metrics", deadline_s=each, headers=f.headers)
    if page.value is None:
        f.writer.miss("metrics", "failed", page.reason, start=start)
    else:
        f.add_text("metrics.txt", page.value.decode(errors="replace"), probe="metrics", start=start)
    start = utc()
    # A route that generates would add a request to a server that cannot answer it, and wait for it.
    routes = [route for name, route in f.dialect.health.items() if name != "generate"]
    found = [probe.ask(f.deployment.api, route, deadline_s=each, headers=f.headers) for route in routes]
    f.writer.add("health.txt", probe.to_text(found).encode(), probe="health", start=start)
    if f.dialect.black_box:
        start = utc()
        info = metrics.fetch(f"{f.deployment.api}/server_info", deadline_s=each, headers=f.headers)
        if info.value is None:
            f.writer.miss("server_info", "failed", info.reason, start=start)
        else:
            f.add_text("server_info.json", info.value.decode(errors="replace"), probe="server_info", start=start)


def _gpus(f: Field, deadline_s: float) -> None:
    start = utc()
    rows = Rows(lambda node, found: f.writer.add(f"gpu.{node}.csv", gpu.to_csv(found).encode(), probe="gpu", start=start, node=node))

    def take(node: Node) -> None:
        found = gpu.sample(f.remotes[node.name], deadline_s=deadline_s)
        if found.value:
            rows.add(node.name, found.value)
            return
        instead = [g for g in f.simulated if g.node == node.name]
        more = "; simulated from the black boxes instead" if instead else ""
        f.writer.miss("gpu", "failed", f"{found.reason}{more}", start=start, node=node.name)
        rows.add(node.name, instead)

    on_nodes(f, take)
    if found := rows.done():
        f.writer.add("gpu.csv", gpu.to_csv(sorted(found, key=lambda g: (g.node, g.index))).encode(), probe="gpu", start=start)


def _processes(f: Field, deadline_s: float) -> None:
    start = utc()
    rows = Rows(lambda node, found: f.add_text(f"ps.{node}.txt", process.to_text(found), probe="process", start=start, node=node))

    def take(node: Node) -> None:
        mine: list[Process] = []
        known = f.pids.get(node.name, {})
        found = process.sample(f.remotes[node.name], f.dialect, list(known.values()), deadline_s=deadline_s)
        if found.value is None:
            f.writer.miss("process", "failed", found.reason, start=start, node=node.name)
            return
        whose = {pid: who for who, pid in known.items()}
        ours = {rank for node_, service in f.services() if node_ is node for rank in service.ranks}
        for row in found.value:
            who = whose.get(row.pid, "")
            # Another deployment's engine on the same node bears the same titles: boxes tell ours, else the fleet file's ranks.
            if f.dialect.black_box and not who:
                continue
            rank = int(who) if who.isdigit() else None if who else row.rank
            if rank is not None and not who and ours and rank not in ours:
                continue
            mine.append(Process(row.pid, row.ppid, row.state, row.title, row.cpu_percent, node.name, rank, row.wchan))
            if row.state != "gone" and not who:
                # A process that is no rank (an engine core, a detokenizer) is dumped too, under its own name.
                f.know(node.name, _called(row) if rank is None else str(rank), row.pid)
        rows.add(node.name, mine)

    on_nodes(f, take)
    if found := rows.done():
        f.add_text("ps.txt", process.to_text(sorted(found, key=lambda row: (row.node, row.pid))), probe="process", start=start)


def _called(row: Process) -> str:
    """A name for a file: ``VLLM::EngineCore`` with pid 70 is ``enginecore_70``."""
    words = re.findall(r"[A-Za-z0-9]+", row.title.split()[0].rsplit("::", 1)[-1]) or ["process"]
    return f"{words[-1].lower()}_{row.pid}"


def _stacks(f: Field, deadline_s: float, *, sample: str = "", native: bool = False, after_s: float = 0.0) -> None:
    """``after_s``: how long after its first sample a node is sampled again, so that frames have time to move."""
    if not f.stacks:
        f.writer.miss(
            "stacks", "skipped", "as many captures as may be have been taken within the hour; this one leaves the processes alone"
        )
        return

    def take(node: Node) -> None:
        pause = max(0.0, f.stacks_at_s.get(node.name, 0.0) + after_s - time.monotonic()) if after_s else 0.0
        time.sleep(min(pause, deadline_s))
        start = utc()
        if not sample:
            f.stacks_at_s[node.name] = time.monotonic()
        known = {who: pid for who, pid in f.pids.get(node.name, {}).items() if not who.startswith("launcher")}
        if not known:
            f.writer.miss("stacks", "failed", "no process of the deployment is known on this node", start=start, node=node.name)
            return
        found = stacks.dump(f.remotes[node.name], list(known.values()), native=native, deadline_s=max(0.5, deadline_s - pause))
        if found.value is None:
            f.writer.miss("stacks", "failed", found.reason, start=start, node=node.name)
            return
        for who, pid in known.items():
            answer = found.value.get(pid, {"reason": "no answer"})
            rank = int(who) if who.isdigit() else None
            if "threads" in answer:
                note = "py-spy left the process stopped; it was continued" if answer.get("continued") else ""
                name = f"pyspy-{who}{f'.{sample}' if sample else ''}.json"
                # One value a line: a command line in it may hold a key, and redaction works by line.
                f.add_text(name, json.dumps(answer["threads"], indent=1), probe="stacks", start=start, node=node.name, rank=rank, note=note)
            else:
                f.writer.miss("stacks", "failed", answer["reason"], start=start, node=node.name, rank=rank)

    on_nodes(f, take)


def _stacks_again(f: Field, deadline_s: float) -> None:
    if not f.stacks:
        return
    _stacks(f, deadline_s, sample=f"t{_SECOND_SAMPLE_S:.0f}", after_s=_SECOND_SAMPLE_S)


def _stacks_native(f: Field, deadline_s: float) -> None:
    _stacks(f, deadline_s, sample="native", native=True)


PROBES: Sequence[Probe] = (
    Probe("black_box", 5.0, 0.2, _black_boxes),
    Probe("log", 10.0, 0.3, _logs),
    Probe("server", 6.0, 0.5, _server),
    Probe("nodes", 5.0, 0.3, machine.clocks_and_tools),
    Probe("gpu", 8.0, 0.5, _gpus),
    Probe("process", 8.0, 0.5, _processes),
    Probe("stacks", 15.0, 1.0, _stacks),
    Probe("stacks_again", 15.0, 4.0, _stacks_again),
    Probe("nccl", 14.0, 2.0, machine.nccl),
    Probe("stacks_native", 30.0, 12.0, _stacks_native, lambda f: "" if f.native else "not asked for: it pauses every process"),
    Probe("kernel", 5.0, 0.5, machine.kernel),
    Probe(
        "cuda_core_dump",
        60.0,
        10.0,
        machine.core_dump,
        lambda f: "" if f.core_dump else "not asked for: it halts the device while it writes",
    ),
)
