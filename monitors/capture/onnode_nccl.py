"""What NCCL says on a node: flight recorders, asked through their pipes, and RAS, asked on its port. Standard library
only: the text of this file is sent to a node's Python. One JSON value on standard output.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_SETTLES_S = 0.3  # a dump that has not grown for so long, and has its end mark, is whole
_ANCESTORS = 8
_MOST_BYTES = 64 << 20
_RAS = "localhost:28028"
_PIPE = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DEBUG_INFO_PIPE_FILE")
_TARGET = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_REMEDY = "start the ranks with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/run/NAME/fr_pipe_"


def flight(pids: Mapping[str, int], wait_s: float = 6.0, **_: Any) -> dict[str, Any]:
    """Ask every rank's recorder for a dump and wait for it: ``{rank: {data, bytes, seconds, of} | {reason, enabled}}``; data
    is base64 of zlib. The dump is written beside the rank's work, over an older one: it counts when it is newer than the
    asking, no longer grows, and has its end."""
    asked: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for rank, pid in pids.items():
        env = _environ(int(pid))
        pipe = _first(env, _PIPE)
        if not pipe:
            why = "the recorder's pipe is not set" if env else "the environment of its process and parents cannot be read"
            reason = f"{why}; {_REMEDY}" if _loaded(int(pid)) else "it has no NCCL loaded"
            found[rank] = {"reason": reason, "enabled": False}
            continue
        why = _poke(f"{pipe}{rank}.pipe")
        if why:
            found[rank] = {"reason": why, "enabled": True}
        else:
            asked[rank] = (_targets(env, rank), time.time(), time.monotonic())
    while asked and any(time.monotonic() - begun < wait_s for _, _, begun in asked.values()):
        for rank, (targets, at, begun) in list(asked.items()):
            data, name = _whole(targets, at)
            if data:
                took = round(time.monotonic() - begun, 2)
                packed = base64.b64encode(zlib.compress(data, 1)).decode()
                found[rank] = {"data": packed, "bytes": len(data), "seconds": took, "of": name}
                del asked[rank]
        time.sleep(0.05)
    for rank, (targets, _, _) in asked.items():
        found[rank] = {"reason": f"asked, and none of {', '.join(targets)} was written whole within {wait_s:.0f} s", "enabled": True}
    return found


def _poke(pipe: str) -> str:
    """Why the recorder could not be asked; empty when it was."""
    try:
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        return f"{pipe}: {'nobody listens on it' if error.errno == errno.ENXIO else error.strerror}"
    try:
        os.write(handle, b"1\n")
    except OSError as error:
        return f"{pipe}: {error.strerror}"
    finally:
        os.close(handle)
    return ""


def _targets(env: Mapping[str, str], rank: str) -> list[str]:
    """Where the dump may appear: where the variable says, else by what different versions have as their default."""
    named = _first(env, _TARGET)
    home = env.get("HOME", "/root")
    stems = [named] if named else [f"{home}/.cache/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]
    return [f"{stem}{rank}" for stem in stems]


def _whole(targets: list[str], since: float) -> tuple[bytes, str]:
    for name in targets:
        with contextlib.suppress(OSError):
            before = Path(name).stat()
            if before.st_mtime < since - 0.01 or not 0 < before.st_size <= _MOST_BYTES or time.time() - before.st_mtime < _SETTLES_S:
                continue
            data = Path(name).read_bytes()
            after = Path(name).stat()
            if (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns) and data.rstrip()[-1:] in (b".", b"}", b"]"):
                return data, name
    return b"", ""


def ras(pids: Mapping[str, int], wait_s: float = 6.0, **_: Any) -> dict[str, Any]:
    """``{text, address}``: what NCCL's RAS thread says of all communicators, as JSON where it can, else as text;
    ``{reason, enabled}`` where it says nothing. ``enabled`` is false when no rank has NCCL loaded."""
    if not any(_loaded(int(pid)) for pid in pids.values()):
        return {"reason": "no rank on this node has NCCL loaded", "enabled": False}
    env = next((found for pid in pids.values() if (found := _environ(int(pid)))), {})
    if env.get("NCCL_RAS_ENABLE") == "0":
        return {"reason": "NCCL_RAS_ENABLE=0", "enabled": False}
    address = env.get("NCCL_RAS_ADDR") or _RAS
    until = time.monotonic() + wait_s
    try:
        text = _ask(address, ["set format json", "verbose status"], until)
        if not text.lstrip().startswith("{"):  # before 2.28 there is no JSON
            text = _ask(address, ["verbose status"], until)
    except OSError as error:
        return {"reason": f"RAS on {address}: {error.strerror or error}; its silence is evidence of its own", "enabled": True}
    if not text.strip():
        return {"reason": f"RAS on {address} took the question and said nothing; its silence is evidence of its own", "enabled": True}
    return {"text": text, "address": address}


def _ask(address: str, lines: list[str], until: float) -> str:
    """Say lines and hear the answer to the last one. A line before it is answered with OK, or the answer is empty."""
    host, _, port = address.strip().rpartition(":")
    with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=max(0.1, until - time.monotonic())) as link:
        file = link.makefile("rb")
        for line in lines[:-1]:
            link.sendall(f"{line}\n".encode())
            link.settimeout(max(0.1, until - time.monotonic()))
            if file.readline(200).strip().upper() != b"OK":
                return ""
        link.sendall(f"{lines[-1]}\n".encode())
        return "".join(_heard(link, file, until))


def _heard(link: socket.socket, file: Any, until: float) -> Iterator[str]:
    """To the end that RAS makes when it has said all; what came before a deadline is kept."""
    size = 0
    while time.monotonic() < until and size < _MOST_BYTES:
        link.settimeout(max(0.1, until - time.monotonic()))
        try:
            data = file.read1(65536)
        except OSError:
            return
        if not data:
            return
        size += len(data)
        yield data.decode(errors="replace")


def _environ(pid: int) -> dict[str, str]:
    """Of a process, or, where its title covers it, of the nearest parent that shows one: it was inherited from there."""
    for _ in range(_ANCESTORS):
        words = _text(f"/proc/{pid}/environ").split("\0")
        found = dict(word.split("=", 1) for word in words if re.match(r"[A-Za-z_]\w*=", word))
        if _first(found, _PIPE) or "PATH" in found:
            return found
        status = re.search(r"^PPid:\s*(\d+)", _text(f"/proc/{pid}/status"), re.M)
        if status is None or int(status[1]) <= 1:
            break
        pid = int(status[1])
    return {}


def _loaded(pid: int) -> bool:
    return "libnccl" in _text(f"/proc/{pid}/maps")


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((env[name] for name in names if env.get(name)), "")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def main() -> None:
    request = json.loads(sys.argv[1])
    functions: tuple[Callable[..., Any], ...] = (flight, ras)
    what = {function.__name__: function for function in functions}[request.pop("what")]
    sys.stdout.write(json.dumps(what(**request)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
