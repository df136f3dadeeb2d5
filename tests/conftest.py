"""What every test may rely on: one compute thread, no network hub, and a run that leaves no process behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Before anything imports torch, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_LEFT_DEADLINE_S = 5.0


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model; a test that asks for it is marked ``model``."""
    from engine import default_model

    return default_model.path()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "default_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a module whose tests left a child process, and say which. What is found is ended."""
    before = {process.pid for process in _children()}
    yield
    deadline = time.monotonic() + _LEFT_DEADLINE_S
    while (left := [one for one in _children() if one.pid not in before]) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
    described = [_describe(process) for process in left]
    for process in left:
        process.kill()
    assert not left, f"left behind by the tests: {described}"


def _children() -> list[psutil.Process]:
    """Children that run, but for multiprocessing's own resource tracker, which ends with this process."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.is_running() and not _ended(process) and "multiprocessing.resource_tracker" not in _describe(process)
    ]


def _ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline()) or process.name()}"
    except psutil.Error:
        return f"{process.pid} (gone)"
