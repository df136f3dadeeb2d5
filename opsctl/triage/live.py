"""Triage of a live deployment: everything is asked at once, and whatever has come by the deadline is the picture.

The capture is the monitor's own, into a folder that is a valid case; the looks are the monitor's own too. Nothing here
changes anything on a node, and no request is sent that the server would have to generate for.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine import blackbox
from monitors import casefolder, fleet
from monitors.capture import bundle, manifest
from monitors.capture.manifest import BundleError, utc
from monitors.judge.moment import Moment
from monitors.judge.progress import Limits, Memory, State, advance
from monitors.judge.scene import Missing
from monitors.lookout import Lookout
from monitors.observe import units
from monitors.remote import Remote
from opsctl.rollout import target
from opsctl.rollout.target import Member
from opsctl.rollout.traces import tracebacks
from opsctl.service.manager import ServiceError
from opsctl.triage import flags, picture, recent
from opsctl.triage.picture import Picture, Seen, ServiceRow
from opsctl.triage.together import Late, together

_LOOK_S = 5.0  # black boxes: what holds work and moves nothing for four seconds is declared
_POLL_S = 0.5
_JUDGE_S = 0.7  # kept for judging and drawing
_LIST_S = 3.0
_CONNECT_S = 3.0
_LAST_TRACEBACKS = 3
_LONGEST = 1200


class Unreachable(Exception):
    """Not one node, service or route answered."""


@dataclass(frozen=True)
class _Asked:
    """One service: the row that a person reads, and its main process's command line."""

    row: ServiceRow
    argv: tuple[str, ...] = ()


def triage(deployment: fleet.Deployment, fleet_path: str, env: Mapping[str, str], *, deadline_s: float, save: Path | None,
           say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Picture:  # fmt: skip
    """Look at a deployment.

    Raises:
        Unreachable: nothing of it answered. OSError: the bundle cannot be written.
    """
    began = clock()
    until = began + deadline_s
    deployment, why = _answering(deployment, began + min(_CONNECT_S, 0.3 * deadline_s), clock)
    members, unknown = _members(deployment, fleet_path, env)
    why += unknown
    unreached = len(why) > len(unknown)
    roles = {service.unit: service.role for node in deployment.node for service in node.service}
    with tempfile.TemporaryDirectory(prefix="triage-", ignore_cleanup_errors=True) as scratch:
        root = save or Path(scratch)
        try:
            before = recent.incidents(fleet.bundle_root(deployment, env), deployment.name, _started(deployment))
        except OSError as error:  # they are the monitor's, and whoever is on call may not read them
            before = ()
            why.append(Missing("the monitor's bundles", f"{error.filename}: {error.strerror}"))
        here = {"here", *(node.name for node in deployment.node if not node.ssh)}
        homes = {service.unit: node.name for node in deployment.node for service in node.service}
        jobs: dict[str, Callable[[], Any]] = {
            f"service {member.name}": functools.partial(_ask, member, roles, homes, here=member.manager.node in here) for member in members
        }
        jobs["looks"] = lambda: _look(deployment, min(_LOOK_S, 0.6 * deadline_s), clock, whole=not unreached)
        jobs["evidence"] = lambda: bundle.capture(
            deployment,
            reason="triage",
            budget_s=max(0.5, until - clock() - 2 * _JUDGE_S),
            root=root,
            progress=recent.watched(before) or None,
            say=say,
        )
        found = together(jobs, until - _JUDGE_S, clock)
        folder = _folder(root, found["evidence"], deployment.name)
        asked = {name.removeprefix("service "): answer for name, answer in found.items() if name.startswith("service ")}
        rows = tuple(_row(name, answer, roles) for name, answer in asked.items())
        services = [answer for answer in asked.values() if isinstance(answer, _Asked)]
        looked = found["looks"] if isinstance(found["looks"], Seen) else None
        shown = {row.name: _shown(row) for row in rows if row.state}
        seen = picture.of_folder(
            folder, units=[units.from_show(text, _artefact(name)) for name, text in shown.items()], roles=_artefacts(deployment),
            now=Moment(time.time()), commands=[answer.argv for answer in services], looked=looked,
        )  # fmt: skip
        if not _reached(seen, rows):
            raise Unreachable(f"{deployment.name}: no service, node or route answered within {deadline_s:g} s: {_gaps(seen, rows)}")
        known, files = _files(seen, members, until - clock())
        late = [Missing(name, f"{answer}") for name, answer in found.items() if isinstance(answer, Exception)]
        whole = replace(
            seen, source=deployment.name, services=rows, flags=known, files=files, incidents=before, missing=(*seen.missing, *late, *why),
            seen=looked, saved=str(folder) if save else "", seconds=clock() - began,
            where=f"--fleet {shlex.quote(fleet_path)} --deployment {shlex.quote(deployment.name)}",
            tracebacks=tuple(trace for row in rows for trace in row.tracebacks) or seen.tracebacks,
        )  # fmt: skip
        if save and not isinstance(found["evidence"], Exception):
            _keep(folder, whole, shown, recent.watched(before))
        return whole


def _answering(deployment: fleet.Deployment, until: float, clock: Callable[[], float]) -> tuple[fleet.Deployment, list[Missing]]:
    """The deployment without the nodes that ssh does not reach: one that is silent must not cost the others their evidence."""

    def knock(node: fleet.Node) -> None:
        with Remote(node) as remote:
            remote.run(["true"], deadline_s=max(0.5, until - clock()))

    found = together({node.name: functools.partial(knock, node) for node in deployment.node if node.ssh}, until + 0.2, clock)
    silent = {name: answer for name, answer in found.items() if isinstance(answer, Exception)}
    left = tuple(node for node in deployment.node if node.name not in silent)
    missing = [Missing(f"everything on node {name}", f"not reached: {answer}") for name, answer in silent.items()]
    return deployment.model_copy(update={"node": left}), missing


def _members(deployment: fleet.Deployment, fleet_path: str, env: Mapping[str, str]) -> tuple[tuple[Member, ...], list[Missing]]:
    try:
        return target.of(deployment, fleet_path, env).members, []
    except (ServiceError, OSError) as error:
        return (), [Missing("service states", str(error))]


def _ask(member: Member, roles: Mapping[str, str], homes: Mapping[str, str], *, here: bool) -> _Asked:
    """``homes``: the fleet file's name of the node, by unit; a manager of this machine knows no name for it."""
    manager = member.manager
    state = manager.snapshot()
    argv = manager.argv()
    lines = manager.log(state.invocation_id) if state.invocation_id else ()
    age = time.monotonic() - state.since_mono if here and state.since_mono and state.main_pid else None
    node = homes.get(member.name.partition("@")[0], manager.node) if here else manager.node
    traces = tuple(dict.fromkeys(trace[-_LONGEST:] for trace in tracebacks(lines)))[-_LAST_TRACEBACKS:]
    row = ServiceRow(
        member.name, node, roles.get(member.name.partition("@")[0], ""), state.state.value, state.invocation_id, state.main_pid,
        state.restarts, state.result, age, traces,
    )  # fmt: skip
    return _Asked(row, argv)


def _row(name: str, answer: Any, roles: Mapping[str, str]) -> ServiceRow:
    if isinstance(answer, _Asked):
        return answer.row
    return ServiceRow(
        name, "", roles.get(name, ""), error=f"{type(answer).__name__}: {answer}" if not isinstance(answer, Late) else str(answer)
    )


def _look(deployment: fleet.Deployment, seconds: float, clock: Callable[[], float], *, whole: bool) -> Seen:
    """The monitor's own look, again and again for so long. Not ``whole``: ranks whose node is silent are not there, and
    what looks like loading is that."""
    lookout, memory = Lookout(deployment), Memory()
    try:
        began = clock()
        while True:
            memory, judgement = advance(memory, lookout.look(quiet_s=memory.quiet_s).sample, Limits())
            passed = clock() - began
            if passed >= seconds:
                state = State.unknown if judgement.state is State.loading and not whole else judgement.state
                return Seen(state.value, judgement.held, judgement.quiet_s, passed)
            time.sleep(_POLL_S)
    finally:
        lookout.close()


def _started(deployment: fleet.Deployment) -> float:
    """When this start of the server began, by its black boxes on this machine; else a day ago."""
    began = []
    for node in deployment.node:
        for service in node.service:
            for path in Path(service.run_dir).glob("rank-*.box") if service.run_dir and not node.ssh else ():
                try:
                    began.append(blackbox.read(path, events=False).header.start_unix_ns / 1e9)
                except (OSError, blackbox.BoxError):
                    continue
    return min(began, default=time.time() - 86400)


def _folder(root: Path, captured: Any, deployment: str) -> Path:
    """The finished bundle, or as much of it as there is: a bundle is valid at every moment. Raises OSError."""
    if isinstance(captured, bundle.Captured):
        return captured.folder
    if isinstance(captured, OSError):
        raise captured
    made = sorted((path for path in root.glob(f"*-{deployment}-triage*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    if made:
        return made[-1]
    raise OSError(None, f"no evidence could be taken: {captured}", str(root))


def _artefacts(deployment: fleet.Deployment) -> dict[str, str]:
    """The role of each log, by the name that a capture gives it."""
    found: dict[str, str] = {}
    for node in deployment.node:
        for service in node.service:
            tag = f".{node.name}-{service.unit.split('.')[0]}" if found else ""
            found[f"journal{tag}.jsonl" if service.log == "journal" else f"server{tag}.log"] = service.role
    return found


def _artefact(name: str) -> str:
    return f"systemctl-show-{re.sub(r'[^A-Za-z0-9_@-]', '-', name.removesuffix('.service'))}.txt"


def _shown(row: ServiceRow) -> str:
    """A service in the words of ``systemctl show``, whichever manager runs it: the judge reads these."""
    return f"ActiveState={row.state}\nNRestarts={row.restarts}\nResult={row.result}\nMainPID={row.pid}\nInvocationID={row.invocation}\n"


def _files(seen: Picture, members: tuple[Member, ...], left_s: float) -> tuple[tuple[flags.Flag, ...], tuple[flags.Flag, ...]]:
    """Flags as they are, and the model folder's files as the first node that has it lists them."""
    folder = flags.model_folder(seen.flags)
    if not folder:
        return seen.flags, flags.files("", None, "no flag names the model's folder")
    if not folder.startswith("/"):
        return seen.flags, flags.files(folder, None, f"{folder} is a name in a cache, not a folder")
    if not members:
        return seen.flags, flags.files(folder, None, "no service whose node could be asked")
    wait_s = max(0.2, min(_LIST_S, left_s))
    ask = functools.partial(members[0].manager.run, ("ls", "-1", "--", folder), wait_s)
    answer = together({"ls": ask}, time.monotonic() + wait_s)["ls"]
    if isinstance(answer, tuple) and answer[0] == 0:
        return seen.flags, flags.files(folder, answer[1].splitlines(), "")
    why = str(answer[2]).strip() if isinstance(answer, tuple) else str(answer)
    return seen.flags, flags.files(folder, None, why)


def _reached(seen: Picture, rows: tuple[ServiceRow, ...]) -> bool:
    scene = seen.scene
    assert scene is not None
    answered = any(h.status for h in scene.health)
    return answered or bool(scene.boxes or scene.processes or scene.logs or scene.metrics) or any(row.state for row in rows)


def _gaps(seen: Picture, rows: tuple[ServiceRow, ...]) -> str:
    told = [f"{row.name}: {row.error}" for row in rows if row.error] + [f"{gap.what}: {gap.reason}" for gap in seen.missing]
    return "; ".join(told[:3])


def _keep(folder: Path, whole: Picture, shown: Mapping[str, str], watched: Mapping[str, Any]) -> None:
    """What triage adds to the bundle: the services' states, its own verdict and all that it said."""
    start = utc()
    try:
        for name, text in shown.items():
            manifest.append(folder, _artefact(name), text.encode(), probe="service", start=start)
        looked = picture.progress(whole.seen)
        if looked or watched:
            said = json.dumps({**watched, **looked}, indent=1).encode()
            manifest.append(folder, "progress.json", said, probe="progress", start=start)
        verdict = casefolder.judge(folder)
        manifest.append(folder, "verdict.json", json.dumps(verdict.to_json(), indent=1).encode(), probe="verdict", start=start)
        (folder / "triage").mkdir(exist_ok=True)
        said = json.dumps(msgspec.to_builtins(whole.to_json()), indent=1).encode()
        manifest.append(folder, "triage/triage.json", said, probe="triage", start=start)
    except BundleError as error:
        raise OSError(None, str(error), str(folder)) from error
