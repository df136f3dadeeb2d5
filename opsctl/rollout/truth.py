"""Rank truth: what every rank on every node really runs, all equal and as planned. What cannot be read is inconclusive.

A rank that set a title has blanked its own arguments, so for the bundled engine each rank's black box and /server_info
speak; for SGLang and vLLM the parent's arguments and the server's own account of its settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from engine import blackbox
from monitors.engines.dialect import ConfigRoutes
from opsctl.callers.foresee import flags_of
from opsctl.rollout.checks import Check, failed, inconclusive, passed
from opsctl.rollout.target import Member, Target
from opsctl.service.manager import Snapshot

_MOST_TOLD = 6
_ALIASES = {
    "tp": "tp_size", "tensor_parallel_size": "tp_size", "dp": "dp_size", "data_parallel_size": "dp_size", "pp": "pp_size",
    "model": "model_path",
}  # fmt: skip


def of_boxes(target: Target, frozen: Mapping[str, Snapshot], info: Mapping[str, Any], want: str) -> Check:
    """Every record that the engine keeps of its configuration carries the planned digest ``want``, of this start."""
    invocations = {snapshot.invocation_id for snapshot in frozen.values()}
    if info.get("invocation_id") not in invocations:
        return failed("ranks", f"/server_info is of invocation {info.get('invocation_id')}, not of this start: who listens there?")
    seen = {"/server_info": str(info.get("config_digest"))}
    seen |= {f"/server_info rank {rank.get('rank')}": str(rank.get("config_digest")) for rank in info.get("ranks", [])}
    settings: dict[str, Mapping[str, Any]] = {"/server_info": _flat(info.get("config"))}
    unread: list[str] = []
    for member in target.members:
        for rank in member.ranks:
            found, why = _box(member, rank, frozen[member.name].invocation_id)
            if found is None:
                unread.append(f"rank {rank} on {member.manager.node}: {why}")
                continue
            seen[f"black box rank {rank}"] = found.header.config_digest
            # What a header claims is only as good as the settings beside it.
            if found.settings_json not in ("", "{}"):
                seen[f"settings of rank {rank}"] = hashlib.sha256(found.settings_json.encode()).hexdigest()[:32]
                settings[f"rank {rank}"] = _flat(_parsed(found.settings_json))
    wrong = {where: digest for where, digest in seen.items() if digest != want}
    if wrong:
        told = ", ".join(f"{where} {digest[:12]}" for where, digest in wrong.items())
        return failed("ranks", f"planned digest {want[:12]}; other: {told}{_differences(settings)}", **seen)
    if unread or not info.get("ranks") or not any(member.ranks for member in target.members):
        why = "; ".join(unread) or "no ranks are named in /server_info or in the fleet file"
        return inconclusive("ranks", f"not every rank could be read: {why}", **seen)
    return passed("ranks", f"{len(seen)} records carry digest {want[:12]}", **seen)


def _box(member: Member, rank: int, invocation_id: str) -> tuple[blackbox.Snapshot | None, str]:
    """(the box, why there is none)."""
    folder = member.run_dir or member.manager.run_dir()
    if not folder:
        return None, "its run_dir is not known; name it in the fleet file"
    path = str(PurePosixPath(folder) / f"rank-{rank}.box")
    try:
        found = blackbox.decode(member.manager.read_file(path), path)
    except (OSError, blackbox.BoxError) as error:
        return None, str(error)
    own = found.header.invocation_id
    if own != invocation_id:
        return None, f"{path} is of invocation {own[:8] or 'none'}, this start is {invocation_id[:8]}"
    return found, ""


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _flat(config: Any) -> dict[str, Any]:
    """``{group: {name: value}}`` as ``{"group.name": value}``."""
    if not isinstance(config, dict):
        return {}
    return {f"{group}.{name}": value for group, values in config.items() if isinstance(values, dict) for name, value in values.items()}


def _differences(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Which settings are not the same everywhere, empty when all are."""
    names = sorted({name for values in settings.values() for name in values})
    told = []
    for name in names:
        values = {where: found[name] for where, found in settings.items() if name in found}
        if len({json.dumps(value, sort_keys=True, default=str) for value in values.values()}) > 1:
            told.append(f"{name} is " + ", ".join(f"{value!r} ({where})" for where, value in values.items()))
    return f"; {'; '.join(told[:_MOST_TOLD])}" if told else ""


def of_arguments(
    target: Target, planned: Mapping[str, Sequence[str]], changed: frozenset[str], routes: ConfigRoutes,
    info: Callable[[], dict[str, Any] | None],
) -> Check:  # fmt: skip
    """For an engine without black boxes, whose parents' arguments are known to be the planned ones: what the server says
    of itself must agree with them. ``changed``: the flags that this rollout is about; ``info`` asks the server."""
    parts = [(member.name, flags_of(planned[member.name])[1]) for member in target.members]
    first = parts[0][1]
    for name, values in parts[1:]:
        odd = sorted(flag for flag in changed if values.get(flag) != first.get(flag))
        if odd:
            return failed("ranks", f"{name} runs another --{odd[0]} than {parts[0][0]}")
    told = info() if routes.routes else None
    if told is None:
        if routes.optional or not routes.routes:
            text = f"the arguments of {len(parts)} parents are the planned ones; {target.engine} tells no more of its settings"
            return passed("ranks", text)
        return inconclusive("ranks", f"the server tells nothing of its settings: none of {', '.join(routes.routes)} is served")
    return _agrees(first, changed, told)


def _agrees(flags: Mapping[str, str], changed: frozenset[str], told: Mapping[str, Any]) -> Check:
    settings = _names(told)
    wrong, same, silent = [], [], []
    for flag, value in flags.items():
        name = flag.replace("-", "_")
        name = name if name in settings else _ALIASES.get(name, name)
        if name not in settings:
            silent += [flag] if flag in changed else []
        elif _equal(value, settings[name]):
            same.append(flag)
        else:
            wrong.append(f"--{flag} is planned as {value or 'set'} and the server has {settings[name]!r}")
    if wrong:
        return failed("ranks", "; ".join(wrong[:_MOST_TOLD]), agree=same)
    if silent:
        return inconclusive("ranks", f"the server does not tell its --{', --'.join(silent)}, which this change is about", agree=same)
    if not same:
        return inconclusive("ranks", "the server's account of its settings names none of the planned flags")
    return passed("ranks", f"the server's own settings agree with {len(same)} planned flags", agree=same)


def _names(told: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, wherever an engine nests them (``server_args``, ``vllm_config``)."""
    found: dict[str, Any] = {}
    for key, value in told.items():
        if isinstance(value, dict):
            found = {**_names(value), **found}
        elif not isinstance(value, list):
            found[key] = value
    return found


def _equal(planned: str, has: Any) -> bool:
    if isinstance(has, bool):
        return (planned.lower() in ("", "true", "1")) == has
    if isinstance(has, int | float):
        try:
            return float(planned) == float(has)
        except ValueError:
            return False
    return str(has) == planned
