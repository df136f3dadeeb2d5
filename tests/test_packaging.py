"""The wheel holds what the tree holds, and its data is found where an installed program looks."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "monitors", "opsctl", "playbooks", "runbooks")
BUILT = {".so", ".pyc"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, offline, with the setuptools of this environment."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy)], check=True, timeout=60)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
               f"--wheel-dir={out}", str(copy)]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (made,) = out.glob("lastbatch-*.whl")
    return made


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    tree = {str(file.relative_to(ROOT)) for package in PACKAGES for file in (ROOT / package).rglob("*")
            if file.is_file() and file.suffix not in BUILT and "__pycache__" not in file.parts}  # fmt: skip
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert tree - packed == set(), "a folder lacks __init__.py, or package-data in pyproject.toml lacks a suffix"


def test_the_wheel_names_licence_scripts_and_version(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= set(archive.namelist())
    assert "License-Expression: Apache-2.0" in archive.read(f"{info}/METADATA").decode()
    assert archive.read(f"{info}/entry_points.txt").decode().splitlines() == [
        "[console_scripts]",
        "hang-monitor = monitors.cli:main",
        "lastbatch = engine.cli:main",
        "opsctl = opsctl.cli:main",
    ]


def test_playbooks_and_runbooks_are_found_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "from importlib.resources import files\n"
        "for package in ('playbooks', 'runbooks'):\n"
        "    print(package, *sorted(f.name for f in files(package).iterdir() if f.name.endswith(('.yaml', '.md'))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    wanted = [
        " ".join([package, *sorted(f.name for f in (ROOT / package).iterdir() if f.suffix in (".yaml", ".md"))])
        for package in ("playbooks", "runbooks")
    ]
    assert ran.stdout.splitlines() == wanted


PROGRAMS = {"py-spy"}
"""Dependencies that are run, not imported."""


def test_every_import_is_declared_and_every_dependency_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[=<>]", line)[0].lower() for line in project["dependencies"]}
    optional = {"systemd-python"}
    distributions = importlib.metadata.packages_distributions() | {"systemd": ["systemd-python"]}
    imported: dict[str, str] = {}
    for package in ("engine", "monitors", "opsctl"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                for name in _imports(node):
                    if name not in sys.stdlib_module_names and name not in PACKAGES:
                        imported.setdefault(distributions[name][0].lower().replace("_", "-"), str(file.relative_to(ROOT)))
    missing = {name: where for name, where in imported.items() if name not in declared | optional}
    assert missing == {}, "add them to pyproject.toml, each with its reason, and their versions to constraints.txt"
    assert declared - imported.keys() - PROGRAMS == set(), "nothing imports these; take them out of pyproject.toml"


def test_every_dependency_has_its_version_in_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {re.split(r"[=<>]", line)[0].lower() for line in wanted} - pinned == set()


def _imports(node: ast.AST) -> list[str]:
    """Top-level names that an import statement loads."""
    match node:
        case ast.Import(names=names):
            return [name.name.split(".")[0] for name in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module.split(".")[0]]
    return []
