"""The probes of a capture, cheap to invasive. A probe is a declaration; deadlines and order are the runner's.

Each probe goes to all nodes in parallel and hands every artefact to the writer as soon as it has it, so that what one
node has given is safe while another still answers. A node that does not answer is a named gap, not a wait.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from monitors.capture import device, nccl
from monitors.capture.manifest import Outcome, Writer, utc
from monitors.capture.redact import Policy, Redaction, redact
from monitors.engines import Dialect
from monitors.fleet import Deployment, Node, Service
from monitors.judge.scene import Gpu, Process
from monitors.observe import boxes, gpu, journal, logfile, metrics, probe, process, rundir, stacks
from monitors.remote import Remote

_LOG_BYTES = 4 << 20
_JOURNAL_LINES = 5000
_SECOND_SAMPLE_S = 3.0


@dataclass
class Field:
    """What the probes work on, and what earlier ones found for later ones. ``pids`` maps node to who to pid, where
    who is a rank's number or a process's name."""

    deployment: Deployment
    dialect: Dialect
    remotes: Mapping[str, Remote]
    writer: Writer
    headers: Mapping[str, str]
    until_s: float
    native: bool = False
    stacks: bool = True
    core_dump: bool = False
    policy: Policy = field(default_factory=Policy)
    pids: dict[str, dict[str, int]] = field(default_factory=dict)
    simulated: list[Gpu] = field(default_factory=list)
    ledger: list[Redaction] = field(default_factory=list)
    stacks_at_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def services(self) -> list[tuple[Node, Service]]:
        return [(node, service) for node in self.deployment.node for service in node.service]

    def add_text(self, path: str, text: str, *, probe: str, start: str, node: str = "", rank: int | None = None, note: str = "") -> None:
        """Keep a text after redaction."""
        clean, ledger = redact(text, path, self.policy)
        with self.lock:
            self.ledger.extend(ledger)
        self.writer.add(path, clean.encode(), probe=probe, start=start, node=node, rank=rank, note=note)

    def know(self, node: str, who: str, pid: int) -> None:
        self.pids.setdefault(node, {})[who] = pid


@dataclass(frozen=True)
class Probe:
    """``deadline_s`` is the most that it may take, ``least_s`` what it needs to be worth starting."""

    name: str
    deadline_s: float
    least_s: float
    run: Callable[[Field, float], None]


def everywhere(field_: Field, work: Callable[[Node, Service], None]) -> None:
    """One service after another on a node, all nodes at once."""

    def node_work(node: Node) -> None:
        for service in node.service:
            work(node, service)

    with concurrent.futures.ThreadPoolExecutor(max(1, len(field_.deployment.node))) as pool:
        for done in [pool.submit(node_work, node) for node in field_.deployment.node]:
            done.result()


def _black_boxes(f: Field, deadline_s: float) -> None:
    if not f.dialect.black_box:
        f.writer.miss("black_box", "skipped", f"{f.dialect.name} writes no black box")
        return
    clocks: dict[str, object] = {}
    began = utc()

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
        clocks[f"{node.name}/{service.unit}"] = {
            "node": node.name, "mono_ns": found.clock.mono_ns, "unix_ns": found.clock.unix_ns, "ranks": [box.rank for box in found.boxes],
        }  # fmt: skip

    everywhere(f, take)
    if clocks:
        f.writer.add("clocks.json", json.dumps(clocks, indent=1).encode(), probe="clocks", start=began)


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
    rows: list[Gpu] = []

    def take(node: Node) -> None:
        found = gpu.sample(f.remotes[node.name], deadline_s=deadline_s)
        if found.value:
            rows.extend(found.value)
            return
        instead = [g for g in f.simulated if g.node == node.name]
        more = "; simulated from the black boxes instead" if instead else ""
        f.writer.miss("gpu", "failed", f"{found.reason}{more}", start=start, node=node.name)
        rows.extend(instead)

    _on_nodes(f, take)
    if rows:
        rows.sort(key=lambda g: (g.node, g.index))
        f.writer.add("gpu.csv", gpu.to_csv(rows).encode(), probe="gpu", start=start)


def _processes(f: Field, deadline_s: float) -> None:
    start = utc()
    rows: list[Process] = []

    def take(node: Node) -> None:
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
            rows.append(Process(row.pid, row.ppid, row.state, row.title, row.cpu_percent, node.name, rank, row.wchan))
            if row.state != "gone" and not who:
                # A process that is no rank (an engine core, a detokenizer) is dumped too, under its own name.
                f.know(node.name, _called(row) if rank is None else str(rank), row.pid)

    _on_nodes(f, take)
    if rows:
        rows.sort(key=lambda row: (row.node, row.pid))
        f.add_text("ps.txt", process.to_text(rows), probe="process", start=start)


def _called(row: Process) -> str:
    """A name for a file: ``VLLM::EngineCore`` with pid 70 is ``enginecore_70``."""
    words = re.findall(r"[A-Za-z0-9]+", row.title.split()[0].rsplit("::", 1)[-1]) or ["process"]
    return f"{words[-1].lower()}_{row.pid}"


def _stacks(f: Field, deadline_s: float, *, sample: str = "", native: bool = False) -> None:
    if not f.stacks:
        f.writer.miss(
            "stacks", "skipped", "as many captures as may be have been taken within the hour; this one leaves the processes alone"
        )
        return

    def take(node: Node) -> None:
        start = utc()
        known = {who: pid for who, pid in f.pids.get(node.name, {}).items() if not who.startswith("launcher")}
        if not known:
            f.writer.miss("stacks", "failed", "no process of the deployment is known on this node", start=start, node=node.name)
            return
        found = stacks.dump(f.remotes[node.name], list(known.values()), native=native, deadline_s=deadline_s)
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

    if not sample:
        f.stacks_at_s = time.monotonic()
    _on_nodes(f, take)


def _stacks_again(f: Field, deadline_s: float) -> None:
    if not f.stacks:
        return
    pause = max(0.0, f.stacks_at_s + _SECOND_SAMPLE_S - time.monotonic())
    time.sleep(min(pause, deadline_s))
    _stacks(f, max(0.5, deadline_s - pause), sample=f"t{_SECOND_SAMPLE_S:.0f}")


def _stacks_native(f: Field, deadline_s: float) -> None:
    if not f.native:
        f.writer.miss("stacks_native", "skipped", "not asked for: it pauses every process")
        return
    _stacks(f, deadline_s, sample="native", native=True)


def _nodes(f: Field, deadline_s: float) -> None:
    """Clock offsets and tool versions, into the manifest's head."""
    clocks: dict[str, object] = {}
    tools: dict[str, object] = {}

    def take(node: Node) -> None:
        start = utc()
        found = device.facts(f.remotes[node.name], deadline_s=deadline_s)
        if found.value is None:
            f.writer.miss("node_clock", "failed", found.reason, start=start, node=node.name)
            return
        clocks[node.name] = found.value.to_json()
        tools[node.name] = found.value.tools

    _on_nodes(f, take)
    f.writer.describe(clocks=dict(sorted(clocks.items())), tools=dict(sorted(tools.items())))


def _kernel(f: Field, deadline_s: float) -> None:
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

    _on_nodes(f, take)


def _nccl(f: Field, deadline_s: float) -> None:
    def take(node: Node) -> None:
        ranks = {who: pid for who, pid in f.pids.get(node.name, {}).items() if who.isdigit()}
        if not ranks:
            f.writer.miss("flight_recorder", "skipped", "no rank is known on this node", node=node.name)
            return
        remote, start = f.remotes[node.name], utc()
        dumps = nccl.flight(remote, ranks, deadline_s=deadline_s / 2)
        for who in ranks:
            row = (dumps.value or {}).get(who, {"reason": dumps.reason, "enabled": True})
            if "data" in row:
                note = f"{row['of']}, {row['seconds']:.2f} s after it was asked for"
                f.writer.add(f"fr-{who}.bin", row["data"], probe="flight_recorder", start=start, node=node.name, rank=int(who), note=note)
            else:
                how: Outcome = "failed" if row["enabled"] else "skipped"
                f.writer.miss("flight_recorder", how, row["reason"], start=start, node=node.name, rank=int(who))
        start = utc()
        said = nccl.ras(remote, ranks, deadline_s=deadline_s / 2)
        row = said.value or {"reason": said.reason, "enabled": True}
        if "text" in row:
            f.add_text(f"ncclras.{node.name}.txt", row["text"], probe="ras", start=start, node=node.name, note=row["address"])
        else:
            f.writer.miss("ras", "failed" if row["enabled"] else "skipped", row["reason"], start=start, node=node.name)

    _on_nodes(f, take)


def _core_dump(f: Field, deadline_s: float) -> None:
    if not f.core_dump:
        f.writer.miss("cuda_core_dump", "skipped", "not asked for: it halts the device while it writes")
        return

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

    _on_nodes(f, take)


def _on_nodes(f: Field, work: Callable[[Node], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(max(1, len(f.deployment.node))) as pool:
        for done in [pool.submit(work, node) for node in f.deployment.node]:
            done.result()


def _kept_words(f: Field, _deadline_s: float) -> None:
    rows = [entry.to_json() for entry in f.ledger]
    f.writer.add("redactions.json", json.dumps(rows, indent=1).encode(), probe="redactions", start=utc())


PROBES: Sequence[Probe] = (
    Probe("black_box", 5.0, 0.2, _black_boxes),
    Probe("log", 10.0, 0.3, _logs),
    Probe("server", 6.0, 0.5, _server),
    Probe("nodes", 5.0, 0.3, _nodes),
    Probe("gpu", 8.0, 0.5, _gpus),
    Probe("process", 8.0, 0.5, _processes),
    Probe("stacks", 15.0, 1.0, _stacks),
    Probe("stacks_again", 15.0, 4.0, _stacks_again),
    Probe("nccl", 14.0, 2.0, _nccl),
    Probe("stacks_native", 30.0, 12.0, _stacks_native),
    Probe("kernel", 5.0, 0.5, _kernel),
    Probe("cuda_core_dump", 60.0, 10.0, _core_dump),
    Probe("redactions", 1.0, 0.0, _kept_words),
)
