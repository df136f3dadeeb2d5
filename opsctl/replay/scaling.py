"""A shipped experiment with some of its keys changed, and a word on what was changed. Pure but for reading the shelf."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml


def shipped(name: str) -> str:
    """The text of a playbook that ships with lastbatch."""
    return (Path(str(resources.files("playbooks"))) / f"{name}.yaml").read_text(encoding="utf-8")


def scaled(text: str, change: Mapping[str, Any], name: str) -> tuple[str, str]:
    """(the playbook of this name, what differs from what ships). Only its experiment is kept: what else a playbook does is
    a step of its own."""
    document = yaml.safe_load(text)
    step = next(one for one in document["method"] if "repro" in one)
    told: list[str] = []
    step["repro"] = _merged(step["repro"], change, told)
    kept = {key: document[key] for key in ("kind", "summary", "hypothesis")}
    return yaml.safe_dump({"name": name, **kept, "method": [step]}, sort_keys=False), ", ".join(told)


def _merged(old: Mapping[str, Any], change: Mapping[str, Any], told: list[str], where: str = "") -> dict[str, Any]:
    found = copy.deepcopy(dict(old))
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = _merged(found[key], value, told, f"{where}{key}.")
        elif key not in found or found[key] != value:
            told.append(f"{where}{key} {found.get(key, 'its default')} -> {value}")
            found[key] = value
    return found
