"""A patched file mounted over another one, as a service sees it: what was planned is what each process must read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from opsctl.rollout import checks
from opsctl.rollout.checks import Check
from opsctl.rollout.flags import EditError
from opsctl.service.manager import ServiceManager

_READ_S = 30.0
# Each process reads through its own mount namespace. One that ended meanwhile is no witness.
SUMS = 'target=$1; shift; for pid; do [ -d "/proc/$pid/root" ] || continue; echo "$pid $(sha256sum <"/proc/$pid/root$target" 2>&1)"; done'


class Overlay(msgspec.Struct, frozen=True):
    """``file`` is the operator's own; on each machine it is kept under ``name``."""

    file: str
    target: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.sha256[:16]}-{Path(self.target).name}"

    def data(self) -> bytes:
        """Raises EditError when the file is not any more what was planned."""
        found = _read(self.file)
        if hashlib.sha256(found).hexdigest() != self.sha256:
            raise EditError(f"{self.file}: changed since it was planned; plan again")
        return found


def parse(text: str) -> Overlay:
    """``FILE=TARGET``. Raises EditError."""
    file, equals, target = text.partition("=")
    if not file or not equals or not target.startswith("/"):
        raise EditError(f"--overlay {text}: write --overlay FILE=TARGET, TARGET being the absolute path that the service reads")
    return Overlay(str(Path(file).absolute()), target, hashlib.sha256(_read(file)).hexdigest())


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise EditError(f"--overlay {file}: {error.strerror}") from error


def sha_of(source: str) -> str:
    """The first digits of the content that a mounted file was kept under (see ``Overlay.name``)."""
    return source.rsplit("/", 1)[-1].partition("-")[0]


def seen(manager: ServiceManager, target: str, pids: Sequence[int]) -> dict[int, str]:
    """Process -> SHA-256 of the target as that process sees it, or what went wrong. Raises ServiceError."""
    _, out, _ = manager.run(("sh", "-c", SUMS, "opsctl", target, *map(str, pids)), _READ_S)
    found = {}
    for line in out.splitlines():
        pid, _, rest = line.partition(" ")
        found[int(pid)] = rest.split()[0] if rest.endswith(" -") else rest
    return found


def check(managers: Sequence[ServiceManager], mounts: Mapping[str, Mapping[str, str]]) -> Check:
    """``mounts``: service -> target -> kept file. Every process of every service reads the planned bytes."""
    wrong, read, data = [], 0, {}
    for manager in managers:
        for target, source in mounts.get(manager.name, {}).items():
            sums = seen(manager, target, manager.pids())
            data[f"{manager.name}:{target}"] = {str(pid): value for pid, value in sums.items()}
            read += len(sums)
            if not sums:
                return checks.inconclusive("overlays", f"{manager.name}: no process can be asked what it reads at {target}", **data)
            wrong += [
                f"process {pid} of {manager.name}: {value[:60]}" for pid, value in sums.items() if not value.startswith(sha_of(source))
            ]
    if wrong:
        return checks.failed("overlays", f"a file is not what was planned: {'; '.join(wrong[:4])}", **data)
    return checks.passed("overlays", f"{read} reads in the processes' own mount namespaces are as planned", **data)
