"""What a guarded rollout costs, beside one boot of the same deployment: how soon a crash is known, how long a revert
takes, what opsctl itself adds."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsctl.rollout import boots
from tests.e2e.rollout_group import Group
from tests.slow.bench.figures import Pair

if TYPE_CHECKING:
    from tests.slow.bench.parts import Bench

_CRASHED = b"Main process exited, code=exited, status=1"  # an ordered stop ends otherwise
STABLE_S = 1.0


class _Tail:
    """When a line comes into a log file, on this process's clock."""

    def __init__(self, path: Path, mark: bytes) -> None:
        self.seen = 0.0
        self._path, self._mark, self._from = path, mark, path.stat().st_size
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self.seen and not self._over.wait(0.005):
            with self._path.open("rb") as file:
                file.seek(self._from)
                if self._mark in file.read():
                    self.seen = time.monotonic()

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def _apply(group: Group, *words: str) -> tuple[dict[str, Any], float, float]:
    """(the result, how long opsctl took, when it said that it reverts)."""
    begun, known = time.monotonic(), 0.0
    process = group.spawn("apply", "--yes", "--stable-s", str(STABLE_S), *words)
    assert process.stderr is not None and process.stdout is not None
    for line in process.stderr:
        if line.startswith("reverting:"):
            known = time.monotonic()
    answer: dict[str, Any] = json.loads(process.stdout.read())
    process.wait()
    process.stderr.close()
    process.stdout.close()
    return answer["data"], time.monotonic() - begun, known


def rollout(bench: Bench) -> list[Pair]:
    """Two ranks of the engine with a small random model under two services; each figure beside that deployment's own boot."""
    group = Group(bench.scratch / "rollout")
    known_s, revert_s, own_s, down_s, boot_s = [], [], [], [], []
    try:
        group.start()
        bench.note_load("rollout")
        for turn in bench.turns("rollout", "a change that crashes, then one that is good"):
            tail = _Tail(group.folder / "log" / "0.log", _CRASHED)
            found, _, known = _apply(group, "--set", "disable-overlap-schedule")
            tail.close()
            moments = found["moments"]
            known_s.append(max(known - tail.seen, 0.0))
            revert_s.append(moments["revert: first good answer"] - moments["revert begun"])
            found, took, _ = _apply(group, "--set", f"page-size={16 << (turn % 2 + 1)}")
            assert found["state"] == "committed", found["why"]
            boot = boots.read(group.journals)[-1].seconds
            boot_s.append(boot)
            own_s.append(took - boot - STABLE_S)
            down_s.append(found["without_service_s"])
    finally:
        group.close()

    def pair(label: str, ours: list[float], note: str = "") -> Pair:
        return Pair("rollout", label, "s", "opsctl", tuple(ours), "one boot", tuple(boot_s), note)

    return [
        pair("a crash is known after it happens", known_s), pair("a revert, until it answers", revert_s),
        pair("no service in a good change", down_s), pair("opsctl itself in a good change", own_s, "all but boot and stability window"),
    ]  # fmt: skip
