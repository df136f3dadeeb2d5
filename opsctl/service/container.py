"""A container that a systemd unit runs in the foreground, with docker or podman: the unit is started, stopped and
changed as any other; what runs inside is known by the container's own id, which is a second key of an invocation.

``docker run --restart=always`` starts a container again without the unit noticing: the count of those restarts and the
id are part of what a snapshot compares. Lines that the runtime's journald driver wrote bear the container's id and not
the unit's invocation (under docker that of docker.service), so they are asked for by the id.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any

from opsctl.service import journal
from opsctl.service.manager import Line, ServiceError, Snapshot
from opsctl.service.systemd import Node, SystemdService

_INSPECT_S = 15.0


@dataclasses.dataclass(frozen=True)
class Container:
    """What ``inspect`` tells of a container. ``pid``: its first process, as the machine numbers it (0: none runs)."""

    id: str
    image: str
    command: tuple[str, ...]
    pid: int
    restarts: int


def parse(text: str, name: str) -> Container:
    """The answer of ``docker inspect NAME`` or ``podman inspect NAME``. Raises ServiceError for another shape."""
    try:
        found: dict[str, Any] = json.loads(text)[0]
        config, state = found["Config"], found["State"]
        image = config.get("Image") or found["ImageName"]
        return Container(found["Id"], str(image), tuple(config.get("Cmd") or ()), int(state["Pid"]), int(found.get("RestartCount") or 0))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServiceError(f"container {name}: its inspection cannot be read: {error!r}") from error


class ContainerService(SystemdService):
    """``container``: its name. The runtime is the first word of the unit's command."""

    def __init__(self, node: Node, unit: str, container: str, *, user: bool = False) -> None:
        super().__init__(node, unit, user=user)
        self._container = container
        self._runtime_word = ""
        self._ids: dict[str, str] = {}  # invocation -> container id, as it was seen alive

    def _runtime(self) -> str:
        self._runtime_word = self._runtime_word or self.command().argv[0]
        return self._runtime_word

    def _inspect(self) -> Container | None:
        """None when there is no such container now."""
        done = self._do(self._runtime(), "inspect", self._container, deadline_s=_INSPECT_S)
        return parse(done.out.decode(errors="replace"), self._container) if not done.code else None

    def snapshot(self) -> Snapshot:
        """The unit's, with the container's id and restarts: a new id or a restart inside is another start."""
        found = super().snapshot()
        inside = self._inspect() if found.main_pid else None
        if inside is None:
            return found
        self._ids[found.invocation_id] = inside.id
        return dataclasses.replace(found, container_id=inside.id, restarts=found.restarts + inside.restarts)

    def argv(self) -> tuple[str, ...]:
        """The unit's command as the container that runs bears it out: its image and its arguments are the container's
        own. Empty when no container runs."""
        inside, planned = self._inspect(), self.command().argv
        if inside is None or not inside.pid:
            return ()
        at = image_at(planned, inside.image)
        return (*planned[: at + 1], *(inside.command if len(planned) > at + 1 else ()))

    def image(self) -> str:
        """As the unit's command names it: podman tells the name that it resolved a short one to."""
        inside = self._inspect()
        if inside is None:
            raise ServiceError(f"{self.name}: no container {self._container} runs, so its image is not known; start the service first")
        planned = self.command().argv
        return planned[image_at(planned, inside.image)]

    def has_image(self, name: str) -> bool:
        return self._do(self._runtime(), "image", "inspect", name, deadline_s=_INSPECT_S).code == 0

    def pids(self) -> tuple[int, ...]:
        """The container's processes: the unit's own may hold no more than the runtime's client."""
        inside = self._inspect()
        if inside is None or not inside.pid:
            return ()
        script = (
            'g=$(sed -n "s/^0:://p" "/proc/$1/cgroup"); find "/sys/fs/cgroup$g" -name cgroup.procs -exec cat {} + 2>/dev/null; echo "$1"'
        )
        return tuple(sorted({int(word) for word in self.must(script, str(inside.pid)).split()}))

    def preflight(self) -> tuple[str, ...]:
        problems = list(super().preflight())
        argv = self.command().argv
        if "run" not in argv:
            problems.append(f"{self.name}: its command is no `run` of a container: {shlex.join(argv[:3])}")
        if any(word in ("-d", "--detach", "--detach=true") for word in argv):
            problems.append(f"{self.name}: runs its container detached, so systemd sees it end at once; take --detach out")
        return tuple(problems)

    def log(self, invocation_id: str, *, last_s: float | None = None) -> tuple[Line, ...]:
        ids = self._ids.get(invocation_id, "")
        return journal.lines(self._do, invocation_id, user=self._user, container_id=ids, last_s=last_s)


def image_at(argv: Sequence[str], image: str) -> int:
    """Where a command names the image that its container runs. Raises ServiceError when that is not one place."""
    places = [at for at, word in enumerate(argv) if word == image] or [at for at, word in enumerate(argv) if _is_short_for(word, image)]
    if len(places) != 1:
        raise ServiceError(f"the image {image} is {len(places)} times in the unit's command, not once: {shlex.join(argv)[:200]}")
    return places[0]


def _is_short_for(word: str, image: str) -> bool:
    """``lb`` and ``lb:latest`` are short for ``docker.io/library/lb:latest``."""
    whole = word if ":" in word.rpartition("/")[2] or "@" in word else f"{word}:latest"
    return bool(word) and not word.startswith("-") and (whole == image or image.endswith(f"/{whole}"))
