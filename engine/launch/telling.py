"""What the launcher says of its children: the line when it is ready, what it waits for before, launcher.json. Pure."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.blackbox import Snapshot
from engine.config import Settings
from engine.launch.children import Child, Family


def served(settings: Settings, model: Path, family: Family, threads: int) -> str:
    """What is served, where and with how much, as rank 0 and the API process have said; empty on a node without them."""
    said = {child.rank: child.said.decode(errors="replace") for child in family.children}
    if 0 not in said:
        return ""
    facts = json.loads(said[0])
    _, host, port = said[None].split()
    return (f", http://{f'[{host}]' if ':' in host else host}:{port}, {model.name}, {facts['device']}, {facts['dtype']}, "
            f"tp {settings.parallel.tp}, {threads} threads a rank, context {facts['context']} tokens, "
            f"KV pool {facts['pool_tokens']} tokens ({facts['pool_bytes'] / 1e9:.2f} GB a rank)")  # fmt: skip


def awaited(family: Family, boxes: Mapping[int, Snapshot]) -> str:
    """What is not ready yet."""
    waits: list[str] = []
    for child in family.children:
        if child.rank is None:
            waits += [] if child.is_ready else [f"{child.name} does not listen yet"]
        elif child.rank not in boxes:
            waits.append(f"{child.name} loads Python and PyTorch")
        elif child.rank == 0 and not child.is_ready:
            waits.append(f"{child.name} is in phase {boxes[0].host.phase.name}")
    return "; ".join(waits) or "waiting for the other nodes"


def described(settings: Settings, family: Family, invocation: str, run_dir: Path, *, ready: bool) -> dict[str, Any]:
    """launcher.json."""
    api = next((child for child in family.children if child.rank is None), None)
    said = api.said.decode(errors="replace").split() if api is not None else []
    return {
        "pid": os.getpid(), "invocation_id": invocation, "api_pid": api.pid if api else None,
        "host": said[1] if len(said) == 3 else settings.server.host,
        "port": int(said[2]) if len(said) == 3 else settings.server.port,
        "node_rank": settings.parallel.node_rank, "config_digest": settings.digest,
        "ranks": [{"rank": child.rank, "pid": child.pid} for child in family.children if child.rank is not None],
        "run_dir": str(run_dir), "ready": ready,
    }  # fmt: skip


def ending(child: Child) -> str:
    """How a child that has ended did so."""
    code = child.process.returncode
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
