"""The wheel holds what the tree holds, and its data is found where an installed program looks."""

from __future__ import annotations

import os
import subprocess
import sys
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
