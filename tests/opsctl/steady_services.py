"""A small real service under every service manager that a contract is tried on: the embedded supervisor, systemd's own, a
user's, and a container of a fake runtime on a node."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from e2e import nodes

from opsctl.service import wait
from opsctl.service.container import ContainerService
from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import ServiceManager, State
from opsctl.service.systemd import SystemdService
from opsctl.service.wait import Waiter
from tests.opsctl.site import wait_until

STEADY = Path(__file__).parent / "steady.py"
FAKE_RUNTIME = Path(__file__).parent / "fake_runtime.py"
# As user@0.service, without the login manager that this node has not.
USER_MANAGER = """[Service]
Type=notify
ExecStartPre=/bin/mkdir -p -m 700 /run/user/0
ExecStart=/lib/systemd/systemd --user
Environment=XDG_RUNTIME_DIR=/run/user/0 HOME=/root
Delegate=yes
KillMode=mixed
Slice=user-0.slice
"""
WAITER = Waiter(poll_s=0.02)


class Make(Protocol):
    def __call__(self, *args: str) -> ServiceManager: ...


def embedded(folder: Path) -> Iterator[Make]:
    made: list[EmbeddedService] = []
    env = {"PATH": os.environ["PATH"], "XDG_STATE_HOME": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder / "run"), "HOME": str(folder)}

    def make(*args: str) -> ServiceManager:
        name = f"steady{len(made)}"
        argv = [sys.executable, str(STEADY), "serve", *args]
        (folder / f"{name}.toml").write_text(f"argv = {json.dumps(argv)}\nrestart_s = 0.3\nstop_s = 2\nenv = {{ MARK = 'defined' }}\n")
        made.append(EmbeddedService(folder, name, env))
        return made[-1]

    yield make
    for service in made:
        if token := service.lease_token():
            service.disarm(token)
        service.end()
        wait_until(lambda service=service: service.ended, what="the supervisor to end")


def on_node(node: nodes.SystemdNode, kind: str) -> Iterator[Make]:
    made: list[SystemdService] = []
    user = kind == "systemd-user"
    folder = node.root / ("root/.config/systemd/user" if user else "etc/systemd/system")
    folder.mkdir(parents=True, exist_ok=True)
    if user:
        (node.root / "etc/systemd/system/user@0.service").write_text(USER_MANAGER)
        done = node.run(["sh", "-c", "systemctl daemon-reload; systemctl start user@0.service"])
        assert done.code == 0, done.err

    def make(*args: str) -> ServiceManager:
        name = f"{kind}{len(list(folder.glob(f'{kind}[0-9]*.service')))}"
        argv = [sys.executable, str(STEADY), "serve", *args]
        if kind == "container":
            argv = [str(FAKE_RUNTIME), "run", "--rm", "--name", name, "steady:1", "serve", *args]
        start = " ".join(json.dumps(word) for word in argv)
        more = f"Environment=FAKE_RUNTIME_PROGRAM={sys.executable}:{STEADY}\nSuccessExitStatus=143\n" if kind == "container" else ""
        (folder / f"{name}.service").write_text(
            f"[Service]\nType=notify\nNotifyAccess=all\nExecStart={start}\nEnvironment=MARK=defined PYTHONUNBUFFERED=1\n{more}"
            "KillMode=mixed\nTimeoutStopSec=2\nRestart=on-failure\nRestartSec=0.3\n[Unit]\nStartLimitIntervalSec=0\n"
        )
        unit = f"{name}.service"
        made.append(ContainerService(node, unit, name) if kind == "container" else SystemdService(node, unit, user=user))
        made[-1]._systemctl("daemon-reload")
        return made[-1]

    yield make
    for service in made:
        if token := service.lease_token():
            service.disarm(token)
        service.remove_trial()
    wait.stop(made, WAITER, 30)


def start(service: ServiceManager) -> str:
    """Start and wait until it is ready; the invocation."""
    wait.start([service], WAITER, 30)
    WAITER.until("ready", lambda: service.snapshot().state is State.active, 30)
    return service.snapshot().invocation_id


def said(service: ServiceManager, invocation: str) -> dict[str, Any]:
    """What the program printed about this start of itself."""
    found: list[str] = []

    def there() -> bool:
        found[:] = [line.text for line in service.log(invocation) if line.text.startswith("start ")]
        return bool(found)

    wait_until(there, what="the program's own line")
    answer: dict[str, Any] = json.loads(found[0].removeprefix("start "))
    return answer
