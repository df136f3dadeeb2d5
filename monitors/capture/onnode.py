"""What a capture and ``doctor`` ask of a node beside the signals of ``observe/onnode.py``. Standard library only: the
text of this file is sent to a node's Python. One JSON value on standard output.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_KERNEL = re.compile(
    r"NVRM|Xid|nvidia|SXid|amdgpu|oom|Out of memory|Killed process|segfault|mlx[45]|infiniband|ib[0-9]|link (?:is )?down"
    r"|hung task|blocked for more|soft lockup|I/O error|MCE|EDAC|PCIe|AER",
    re.I,
)
_UPTIME = re.compile(r"^(?:<\d+>)?\[\s*(?P<s>\d+\.\d+)\]")
_PIPE_BYTE = b"1"


def facts(py_spy: str = "", **_: Any) -> dict[str, Any]:
    """The node's clock and what stands on it."""
    uname = os.uname()
    return {
        "unix_ns": time.time_ns(), "mono_ns": time.monotonic_ns(), "boot_id": _text("/proc/sys/kernel/random/boot_id"),
        "synchronized": _synchronised(), "host": uname.nodename, "zone_s": time.localtime().tm_gmtoff,
        "tools": {
            "kernel": uname.release, "python": ".".join(map(str, sys.version_info[:3])),
            "py_spy": _version([py_spy or _beside("py-spy") or "py-spy", "--version"]),
            "systemd": _version(["systemctl", "--version"]), "cpu": _cpu(),
            "nvidia_driver": _driver(), "ncclras": shutil.which("ncclras") or "",
        },
    }  # fmt: skip


def kernel(since_s: float = 3600.0, **_: Any) -> dict[str, Any]:
    """``{lines, of}``: lines of the kernel's ring about devices, memory and links of the last ``since_s``, or ``{reason}``."""
    tool = shutil.which("dmesg")
    if not tool:
        return {"reason": "there is no dmesg"}
    try:
        done = subprocess.run([tool], capture_output=True, timeout=4, stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"reason": f"dmesg: {error}"}
    if done.returncode != 0:
        return {"reason": "dmesg: " + done.stderr.decode(errors="replace").strip()[:200]}
    uptime = float((_text("/proc/uptime") or "0").split()[0])
    lines = done.stdout.decode(errors="replace").splitlines()
    kept = [line[:1000] for line in lines if _KERNEL.search(line) and _recent(line, uptime, since_s)]
    return {"lines": kept[-500:], "of": len(lines)}


def _recent(line: str, uptime: float, since_s: float) -> bool:
    stamp = _UPTIME.match(line)
    return stamp is None or uptime - float(stamp["s"]) <= since_s


def network(sysfs: str = "/sys/class", **_: Any) -> dict[str, Any]:
    """``{nics: {name: {state, speed, counters}}, rdma: {device/port: {state, rate, counters}}}``; only what is not zero."""
    nics: dict[str, Any] = {}
    for where in _children(f"{sysfs}/net"):
        if where.name == "lo":
            continue
        counters = _counters(where / "statistics")
        nics[where.name] = {"state": _text(where / "operstate"), "speed": _text(where / "speed"), "counters": counters}
    rdma: dict[str, Any] = {}
    for device in _children(f"{sysfs}/infiniband"):
        for port in _children(device / "ports"):
            counters = {**_counters(port / "counters"), **_counters(port / "hw_counters")}
            rdma[f"{device.name}/{port.name}"] = {"state": _text(port / "state"), "rate": _text(port / "rate"), "counters": counters}
    return {"nics": nics, "rdma": rdma}


def core_dump(pids: Sequence[int], wait_s: float = 20.0, **_: Any) -> dict[str, Any]:
    """Ask the CUDA driver for a device core dump of each process: one byte into the pipe that it opened because of
    CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1. ``{pid: {file, bytes, seconds} | {reason}}``. The file stays on the node: it
    can be as large as the device's memory."""
    found: dict[str, Any] = {}
    for pid in pids:
        env = _environ(pid)
        cwd = _link(f"/proc/{pid}/cwd")
        host = os.uname().nodename
        pipe = _expand(env.get("CUDA_COREDUMP_PIPE") or f"corepipe.cuda.{host}.{pid}", cwd, host, pid)
        target = _expand(env.get("CUDA_COREDUMP_FILE") or f"core.cuda.{host}.{pid}", cwd, host, pid)
        began = time.monotonic()
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            nobody = "the driver does not listen on it" if error.errno == errno.ENXIO else error.strerror
            remedy = "start the ranks with CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 and CUDA_COREDUMP_GENERATION_FLAGS=skip_abort"
            found[str(pid)] = {"reason": f"{pipe}: {nobody}; {remedy}"}
            continue
        try:
            os.write(descriptor, _PIPE_BYTE)
        finally:
            os.close(descriptor)
        size, settled = -1, 0
        while time.monotonic() - began < wait_s and settled < 4:
            time.sleep(0.25)
            now = _size(target)
            settled = settled + 1 if now == size and now > 0 else 0
            size = now
        if size > 0:
            found[str(pid)] = {"file": target, "bytes": size, "seconds": round(time.monotonic() - began, 2), "whole": settled >= 4}
        else:
            found[str(pid)] = {"reason": f"asked through {pipe}; {target} did not appear within {wait_s:.0f} s"}
    return found


def proofs(pids: Sequence[int] = (), units: Sequence[str] = (), logs: Sequence[str] = (), folders: Sequence[str] = (), py_spy: str = "",
           ras_port: int = 28028, **_: Any) -> list[dict[str, Any]]:  # fmt: skip
    """What a capture on this node will need, each proven now: ``[{name, ok, text, remedy}]``. ``ok`` is null where it
    cannot be told, or where its absence costs evidence but is no fault."""
    rows = [_ptrace()]
    tool = py_spy or _beside("py-spy") or shutil.which("py-spy") or ""
    if not tool:
        rows.append(_row("py-spy", False, "not installed on this node", "pip install py-spy on the node, or name it by the key py_spy"))
    for pid in pids if tool else ():
        rows.append(_dump(tool, int(pid)))
    if tool and not pids:
        rows.append(_dump(tool, os.getpid(), "no rank runs; tried on the collector itself"))
    rows.append(_nvml())
    rows += [_journal(unit) for unit in units]
    rows += [_log(path) for path in logs]
    rows += [_folder(path) for path in folders]
    rows += [_recorder(int(pid)) for pid in pids]
    rows.append(_ras(ras_port))
    found = kernel()
    rows.append(_row("kernel log", "lines" in found, found.get("reason") or f"{found['of']} lines can be read",
                     "sysctl kernel.dmesg_restrict=0, or run as root / with CAP_SYSLOG"))  # fmt: skip
    return rows


def _row(name: str, ok: bool | None, text: str, remedy: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "text": text, "remedy": "" if ok else remedy}


def _ptrace() -> dict[str, Any]:
    scope = _text("/proc/sys/kernel/yama/ptrace_scope")
    status = _text("/proc/self/status")
    caps = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.M)
    may = bool(caps and int(caps[1], 16) >> 19 & 1)  # CAP_SYS_PTRACE
    ok = scope in ("", "0") or may
    said = f"yama ptrace_scope {scope or 'absent'}, CAP_SYS_PTRACE {'held' if may else 'not held'}"
    return _row(
        "ptrace", ok, said, "run as the ranks' user with kernel.yama.ptrace_scope=0, or as root, or AmbientCapabilities=CAP_SYS_PTRACE"
    )


def _dump(tool: str, pid: int, why: str = "") -> dict[str, Any]:
    exe = Path(_link(f"/proc/{pid}/exe") or "?").name
    name = f"py-spy of pid {pid} ({exe})"
    began = time.monotonic()
    try:
        done = subprocess.run(
            [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)], capture_output=True, timeout=8, stdin=subprocess.DEVNULL
        )
        if done.returncode == 0:
            text = f"{len(json.loads(done.stdout))} threads in {time.monotonic() - began:.2f} s"
            return _row(name, True, f"{text}; {why}" if why else text)
        said = " ".join(done.stderr.decode(errors="replace").split())[:200]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said = str(error)[:200]
    return _row(name, False, said, "see the ptrace line; else update py-spy: it must know this interpreter's version")


def _nvml() -> dict[str, Any]:
    remedy = "pip install nvidia-ml-py on the node and see that libnvidia-ml.so.1 can be loaded (in a container: the utility capability)"
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        smi = shutil.which("nvidia-smi")
        return _row("NVML", True if smi else None, f"no pynvml; {'nvidia-smi is used' if smi else 'no nvidia-smi'}", remedy)
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
        return _row("NVML", count > 0, f"{count} GPUs", remedy)
    except pynvml.NVMLError as error:
        return _row("NVML", None, f"{error}: no GPU reading on this node", remedy)


def _journal(unit: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            ["journalctl", "-n", "1", "-o", "json", "--no-pager", "-u", unit], capture_output=True, timeout=8, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _row(f"journal of {unit}", False, str(error), "is systemd-journald running on the node?")
    said = done.stderr.decode(errors="replace").strip()
    ok = done.returncode == 0 and bool(done.stdout.strip()) and "not seeing messages" not in said
    text = "readable" if ok else said.splitlines()[0][:200] if said else "no entry of this unit"
    return _row(
        f"journal of {unit}",
        ok,
        text,
        "add the monitor's user to the group systemd-journal; check the unit's name and StandardOutput=journal",
    )


def _log(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            file.seek(0, os.SEEK_END)
            return _row(f"log {path}", True, f"{file.tell()} bytes, readable")
    except OSError as error:
        return _row(f"log {path}", False, str(error.strerror), "does the service write there, and may the monitor's user read it?")


def _folder(path: str) -> dict[str, Any]:
    boxes = list(Path(path).glob("rank-*.box"))
    if not Path(path).is_dir():
        return _row(f"run directory {path}", None, "does not exist (nothing has been started there)", "is run_dir right in the fleet file?")
    unread = [box.name for box in boxes if not os.access(box, os.R_OK)]
    return _row(
        f"run directory {path}",
        not unread,
        f"{len(boxes)} black boxes" + (f", not readable: {unread}" if unread else ""),
        "run as the ranks' user or root",
    )


def _recorder(pid: int) -> dict[str, Any]:
    env = _environ(pid)
    name = f"flight recorder of pid {pid}"
    pipe = env.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
    remedy = "start the ranks with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/run/NAME/fr_pipe_"
    if not env:
        return _row(name, None, "neither the environment of the process nor that of a parent can be read", remedy)
    if not pipe or env.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0") == "0":
        return _row(name, None, "not enabled", remedy)
    found = sorted(str(path) for path in Path(pipe).parent.glob(f"{Path(pipe).name}*"))
    return _row(name, bool(found), f"pipes {', '.join(found)}" if found else f"{pipe}*: no pipe", remedy)


def _ras(port: int) -> dict[str, Any]:
    with contextlib.closing(socket.socket()) as probe:
        probe.settimeout(1.0)
        taken = probe.connect_ex(("127.0.0.1", port)) == 0
    text = "answers" if taken else "nobody listens (no NCCL job, or NCCL_RAS_ENABLE=0)"
    remedy = "NCCL 2.24 or newer with NCCL_RAS_ENABLE=1; NCCL_RAS_ADDR names another port"
    return _row(f"NCCL RAS port {port}", True if taken else None, text, remedy)


def _synchronised() -> str:
    return _version(["timedatectl", "show", "-p", "NTPSynchronized", "--value"])


def _cpu() -> str:
    """As the kernel calls it; empty where it does not say."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo") or "", re.M)
    return f"{found[1]}, {os.cpu_count()} cores" if found else ""


def _driver() -> str:
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _text("/proc/driver/nvidia/version"))
    return match[1] if match else ""


def _version(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(list(argv), capture_output=True, timeout=2, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip().splitlines()[0][:80] if done.returncode == 0 and done.stdout.strip() else ""


def _counters(where: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in _children(where):
        text = _text(path)
        if text.lstrip("-").isdigit() and int(text):
            found[path.name] = int(text)
    return found


def _children(where: str | Path) -> list[Path]:
    try:
        return sorted(Path(where).iterdir())
    except OSError:
        return []


def _environ(pid: int) -> dict[str, str]:
    """Of a process, or, where its title covers it, of the nearest parent that shows one: it was inherited from there."""
    for _ in range(8):
        words = _text(f"/proc/{pid}/environ").split("\0")
        found = dict(word.split("=", 1) for word in words if re.match(r"[A-Za-z_]\w*=", word))
        parent = re.search(r"^PPid:\s*(\d+)", _text(f"/proc/{pid}/status"), re.M)
        if "PATH" in found or parent is None or int(parent[1]) <= 1:
            return found
        pid = int(parent[1])
    return {}


def _expand(name: str, cwd: str, host: str, pid: int) -> str:
    return str(Path(cwd or "/") / name.replace("%h", host).replace("%p", str(pid)))


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return -1


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _beside(name: str) -> str:
    path = Path(sys.executable).with_name(name) if sys.executable else Path(name)
    return str(path) if os.access(path, os.X_OK) else ""


def main() -> None:
    request = json.loads(sys.argv[1])
    functions: tuple[Callable[..., Any], ...] = (facts, kernel, network, core_dump, proofs)
    what = {function.__name__: function for function in functions}[request.pop("what")]
    sys.stdout.write(json.dumps(what(**request)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
