"""Where a rank runs: what the launcher tells a rank process through its environment."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.config import Settings


@dataclass(frozen=True)
class Place:
    """Where a rank runs, from the environment that the launcher gives it."""

    settings: Settings
    rank: int
    sockets: Path
    run_dir: Path
    model: Path
    control: int
    ready: int
    invocation: str

    @staticmethod
    def from_environment() -> Place:
        env = os.environ
        return Place(
            Settings.from_json(env["LASTBATCH_SETTINGS"]), int(env["LASTBATCH_RANK"]), Path(env["LASTBATCH_SOCKETS"]),
            Path(env["LASTBATCH_RUN_DIR"]), Path(env["LASTBATCH_MODEL_FOLDER"]), int(env["LASTBATCH_CONTROL_FD"]),
            int(env["LASTBATCH_READY_FD"]), env.get("INVOCATION_ID", ""),
        )  # fmt: skip

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        import torch

        if self.settings.model.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return "cuda" if self.settings.model.device == "cuda" else "cpu"

    def stopped(self) -> bool:
        """Whether the launcher has said stop (or is gone)."""
        return bool(select.select([self.control], [], [], 0)[0])
