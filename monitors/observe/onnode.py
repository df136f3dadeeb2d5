"""What a node can say about itself. Standard library only: the text of this file is sent to a node's Python through
standard input, and the same functions serve this machine in a process of their own.

Usage: ``python onnode.py '{"what": "processes", "deadline_s": 5, ...}'``; one JSON value on standard output.
Reading /proc of a process in trouble can block for ever, so every such read has its own thread and its own limit,
and the process ends with ``os._exit`` however many of them are stuck.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import functools
import json
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_BOX_LOCKS = (32768, 36864)  # where a black box keeps the sequence locks of its two records
_BOX_HEAD = 40960  # everything before the ring
_MOST_XIDS = 100
_listening: dict[str, Any] = {}  # NVML's set of events, while this process keeps NVML open
_BOX_OWNER = struct.Struct("<IIQ")  # at byte 8: pid, slots, start on the monotonic clock in ns


def clock(**_: Any) -> dict[str, Any]:
    """The node's clocks at this moment: boxes are dated by ``mono_ns``."""
    return {"mono_ns": time.monotonic_ns(), "unix_ns": time.time_ns(), "boot_id": _text("/proc/sys/kernel/random/boot_id").strip()}


def boxes(run_dir: str, full: bool = True, **_: Any) -> dict[str, Any]:
    """``{clock, launcher, exists, boxes: [{file, state, data}]}``: state is that of the process that wrote the box,
    data is base64 of zlib. Without ``full`` the ring of events is left out."""
    found = []
    for path in sorted(Path(run_dir).glob("rank-*.box")):
        data = _box(path, None if full else _BOX_HEAD)
        if data:
            state = owner_state(*_BOX_OWNER.unpack_from(data, 8))
            found.append({"file": path.name, "state": state, "data": base64.b64encode(zlib.compress(data, 1)).decode()})
    launcher = None
    with contextlib.suppress(ValueError):
        launcher = json.loads(_text(Path(run_dir) / "launcher.json") or "null")
    return {"clock": clock(), "launcher": launcher, "boxes": found, "exists": Path(run_dir).is_dir()}


def _box(path: Path, limit: int | None) -> bytes:
    """The bytes of a box, read while no writer is inside a record; after 50 tries as they are (a writer that died
    inside a write leaves its lock odd)."""
    data = b""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for _ in range(50):
                before = [view[at : at + 8] for at in _BOX_LOCKS]
                data = view[: limit or len(view)]
                if before == [view[at : at + 8] for at in _BOX_LOCKS] and all(lock[0] % 2 == 0 for lock in before):
                    break
    except (OSError, ValueError):  # vanished, or still empty
        return b""
    return data


def processes(pids: Sequence[int] = (), member: str = "", parents: bool = False, **_: Any) -> dict[str, Any]:
    """``{pid: {...}}`` of the given processes and of all whose title matches ``member``; with ``parents`` also of those
    that started them."""
    wanted = {int(pid) for pid in pids}
    rows: dict[str, Any] = {}
    uptime = float((_text("/proc/uptime") or "0").split()[0])
    tick = os.sysconf("SC_CLK_TCK")
    pattern = re.compile(member) if member else None
    for entry in [found.name for found in Path("/proc").iterdir()]:
        if not entry.isdigit():
            continue
        pid = int(entry)
        title = _limited(functools.partial(_title, pid), "")
        if not title and _state(pid) == "Z":
            title = _text(f"/proc/{pid}/comm").strip()  # a process that has ended keeps only its short name
        if pid not in wanted and not (pattern and title and pattern.search(title)):
            continue
        stat = _stat(f"/proc/{pid}/stat")
        if stat is None:
            continue
        age = max(uptime - stat["start"] / tick, 0.01)
        rows[entry] = {
            "pid": pid, "ppid": stat["ppid"], "state": stat["state"], "threads": stat["threads"], "title": title, "comm": stat["comm"],
            "cpu_s": stat["cpu"] / tick, "cpu_percent": round(100 * stat["cpu"] / tick / age, 1), "age_s": round(age, 2),
            "start_ticks": stat["start"], "wchan": _text(f"/proc/{pid}/wchan"), "tasks": _tasks(pid),
        }  # fmt: skip
    for pid in sorted(wanted):
        rows.setdefault(str(pid), {"pid": pid, "state": "gone"})
    if parents:
        above = {int(row["ppid"]) for row in rows.values() if "ppid" in row} - {int(pid) for pid in rows}
        rows = {**processes(pids=sorted(above)), **rows}
    return rows


def _tasks(pid: int) -> list[dict[str, Any]]:
    rows = []
    with contextlib.suppress(OSError):
        for tid in [entry.name for entry in Path(f"/proc/{pid}/task").iterdir()]:
            stat = _stat(f"/proc/{pid}/task/{tid}/stat")
            if stat:
                wchan = _text(f"/proc/{pid}/task/{tid}/wchan")
                rows.append({"tid": int(tid), "comm": stat["comm"], "state": stat["state"], "cpu": stat["cpu"], "wchan": wchan})
    return rows


def stacks(pids: Sequence[int], py_spy: str = "", native: bool = False, deadline_s: float = 10.0, **_: Any) -> dict[str, Any]:
    """``{pid: {threads | reason, state_before, state_after, continued, seconds}}``, all processes in parallel. A
    target that py-spy left stopped is continued; one that was stopped before is left as it was found."""
    tool = py_spy or _beside("py-spy") or shutil.which("py-spy")
    if not tool:
        return {
            str(pid): {"reason": "py-spy is not installed on this node; pip install py-spy, or name it by the key py_spy"} for pid in pids
        }
    with concurrent.futures.ThreadPoolExecutor(max(1, len(pids))) as pool:
        return dict(zip(map(str, pids), pool.map(lambda pid: _stack(tool, int(pid), native, deadline_s), pids), strict=False))


def _stack(tool: str, pid: int, native: bool, deadline_s: float) -> dict[str, Any]:
    before, started = _state(pid), time.monotonic()
    if before in ("", "Z", "X"):
        return {"reason": f"process {pid} is {'gone' if not before else 'a zombie'}", "state_before": before}
    # --nonblocking reads a running process and works on one in state D or T; --native has to pause it.
    argv = [tool, "dump", "--json", "--native" if native else "--nonblocking", "--pid", str(pid)]
    answer: dict[str, Any] = {"state_before": before}
    try:
        done = subprocess.run(argv, capture_output=True, timeout=deadline_s, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            answer["threads"] = json.loads(done.stdout)
        else:
            answer["reason"] = "py-spy: " + " ".join(done.stderr.decode(errors="replace").split())[:400]
    except subprocess.TimeoutExpired:
        answer["reason"] = f"py-spy was not done after {deadline_s:.1f} s"
    except (OSError, ValueError) as error:
        answer["reason"] = f"py-spy: {error}"
    after = _state(pid)
    # A stop takes effect a moment after it was sent: where the dump failed, look again before trusting the state.
    until = time.monotonic() + (0.3 if "reason" in answer else 0.0)
    while after not in ("T", "t", "") and time.monotonic() < until:
        time.sleep(0.02)
        after = _state(pid)
    answer["continued"] = False
    if after in ("T", "t") and before not in ("T", "t"):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
            answer["continued"] = True
    answer.update(state_after=after, seconds=round(time.monotonic() - started, 3))
    return answer


def gpus(keep: bool = False, **_: Any) -> dict[str, Any]:
    """``{rows: [...]}`` or ``{reason}``: NVML, and nvidia-smi where Python has no NVML. ``keep``: NVML stays open for the
    next call of this process, since to open it costs more than all readings; then ``xids: [{index, xid}]`` are the
    errors of the driver since the last call, which NVML tells only to who has been listening."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return _nvidia_smi("pynvml is not installed (pip install nvidia-ml-py)")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _nvidia_smi(f"NVML: {error}")
    rows, heard = [], {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            rows.append(_gpu(pynvml, index))
        heard = _xids(pynvml, len(rows)) if keep else {}
    except pynvml.NVMLError as error:
        keep = False  # a driver that was reloaded needs a new beginning
        return {"reason": f"NVML: {error}"}
    finally:
        if not keep:
            _listening.clear()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    return {"rows": rows, **heard} if rows else {"reason": "NVML answers and knows no GPU"}


def _xids(nvml: Any, count: int) -> dict[str, Any]:
    """``{xids: [...]}``, and ``xid_gap`` where the driver does not tell them."""
    found: list[dict[str, int]] = []
    try:
        if "set" not in _listening:
            made = nvml.nvmlEventSetCreate()
            for index in range(count):
                nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(index), nvml.nvmlEventTypeXidCriticalError, made)
            _listening["set"] = made
        while len(found) < _MOST_XIDS:
            event = nvml.nvmlEventSetWait_v2(_listening["set"], 0)
            found.append({"index": int(nvml.nvmlDeviceGetIndex(event.device)), "xid": int(event.eventData)})
    except (nvml.NVMLError, AttributeError) as error:
        if not isinstance(error, getattr(nvml, "NVMLError_Timeout", ())):
            return {"xids": found, "xid_gap": f"NVML: {error}"}
    return {"xids": found}


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "source": "nvml"}

    def take(key: str, read: Callable[[], Any]) -> None:
        try:
            row[key] = read()
        except (nvml.NVMLError, AttributeError) as error:  # AttributeError: this pynvml has no such call
            row.setdefault("gaps", {})[key] = str(error)  # one quantity that cannot be read is a gap, not the end of the row

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {**row, "gaps": {"handle": str(error)}}
    take("name", lambda: _str(nvml.nvmlDeviceGetName(handle)))
    take("uuid", lambda: _str(nvml.nvmlDeviceGetUUID(handle)))
    take("rates", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    rates = row.pop("rates", None)
    if rates is not None:
        row.update(util=rates.gpu, mem_util=rates.memory)
    take("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    take("limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    take("pids", lambda: [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)])
    take("sm_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    take("mem_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
    # NVML measures these over 20 ms, and gives KiB a second.
    take("pcie_rx_mb_s", lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES) / 1024)
    take("pcie_tx_mb_s", lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) / 1024)
    take("throttle_bits", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    take("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return row


def _nvidia_smi(why: str) -> dict[str, Any]:
    tool = shutil.which("nvidia-smi")
    if not tool:
        return {"reason": f"{why}, and there is no nvidia-smi"}
    fields = "index,name,uuid,utilization.gpu,utilization.memory,power.draw,enforced.power.limit"
    try:
        argv = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"reason": f"{why}, and nvidia-smi: {error}"}
    if done.returncode != 0:
        return {"reason": f"{why}, and nvidia-smi: {(done.stderr or done.stdout).strip()[:200]}"}
    rows = []
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        row: dict[str, Any] = {"index": int(parts[0]), "name": parts[1], "uuid": parts[2], "source": "nvidia-smi"}
        for key, text in zip(("util", "mem_util", "power_w", "limit_w"), parts[3:], strict=False):
            try:
                row[key] = float(text)
            except ValueError:
                row.setdefault("gaps", {})[key] = text
        rows.append(row)
    return {"rows": rows}


def follow(path: str, offset: int | None = None, inode: int = 0, limit: int = 1 << 20, **_: Any) -> dict[str, Any]:
    """What a log file holds after ``offset``: ``{data, offset, inode, gap}``. Without an offset: its last ``limit``
    bytes. A file that was replaced or cut short is read from its start."""
    with Path(path).open("rb") as file:
        stat = os.fstat(file.fileno())
        start = max(0, stat.st_size - limit) if offset is None else offset if stat.st_ino == inode and stat.st_size >= offset else 0
        gap = max(0, stat.st_size - start - limit)
        file.seek(start + gap)
        data = file.read(limit)
    return {"data": base64.b64encode(data).decode(), "offset": start + gap + len(data), "inode": stat.st_ino, "gap": gap}


def owner_state(pid: int, _slots: int, start_mono_ns: int) -> str:
    """The kernel's letter for the process that wrote a box; ``gone`` when it ended, its number reused or not."""
    stat = _stat(f"/proc/{pid}/stat")
    # A process younger than the box cannot have written it. Five seconds cover the clock's tick and its drift.
    if stat is None or stat["start"] / os.sysconf("SC_CLK_TCK") > start_mono_ns / 1e9 + 5:
        return "gone"
    return str(stat["state"])


def _beside(name: str) -> str:
    path = Path(sys.executable).with_name(name) if sys.executable else Path(name)
    return str(path) if os.access(path, os.X_OK) else ""


def _state(pid: int) -> str:
    stat = _stat(f"/proc/{pid}/stat")
    return stat["state"] if stat else ""


def _stat(path: str) -> dict[str, Any] | None:
    text = _text(path)
    if ")" not in text:
        return None
    # The name stands in brackets and may itself hold brackets and spaces: the last bracket ends it.
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return {
        "comm": name,
        "state": rest[0],
        "ppid": int(rest[1]),
        "cpu": int(rest[11]) + int(rest[12]),
        "threads": int(rest[17]),
        "start": int(rest[19]),
    }


def _title(pid: int) -> str:
    with Path(f"/proc/{pid}/cmdline").open("rb") as file:
        return file.read(4096).replace(b"\0", b" ").strip().decode(errors="replace")


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _str(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _limited(read: Callable[[], str], default: str, seconds: float = 1.0) -> str:
    """``read()``, or the default when it fails or does not come back: the blocked thread is left behind."""
    box: list[str] = []

    def work() -> None:
        with contextlib.suppress(OSError):
            box.append(read())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return box[0] if box else default


_FUNCTIONS: tuple[Callable[..., Any], ...] = (clock, boxes, processes, stacks, gpus, follow)


def serve() -> None:
    """Answer requests, one a line, until there are no more: for a monitor that asks again and again."""
    known = {function.__name__: function for function in _FUNCTIONS}
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            answer = {"value": known[request.pop("what")](**request)}
        except OSError as error:
            answer = {"error": f"{error.filename or ''}: {error.strerror or error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    os._exit(0)


def main() -> None:
    request = json.loads(sys.argv[1])
    if isinstance(request, int):  # the length of this text, which has been read: the rest of the input are requests
        serve()
    what = {f.__name__: f for f in _FUNCTIONS}[request.pop("what")]
    try:
        answer = what(**request)
    except OSError as error:
        sys.stderr.write(f"{error.filename or ''}: {error.strerror or error}\n")
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
