"""Another model, another package: rolled out on a real process, with the old one still there to go back to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.opsctl.site import Site

MakeSite = Callable[..., Site]


def test_another_model_is_served_and_one_that_is_not_there_is_refused(make_site: MakeSite, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    site = make_site(args=["--model", str(old)])
    ran = site.apply("--model", str(tmp_path / "none"))
    assert ran.code == 2 and f"node0: the new {tmp_path}/none is not there on here" in ran.errors[0]["message"]
    ran = site.apply("--model", str(new))
    assert ran.code == 0, ran.err
    assert site.running[0][-2:] == ["--model", str(new)]
    old.rmdir()
    assert site.rollout("plan", "--model", str(old)).code == 2


def test_another_package_runs_the_same_program_and_a_bad_one_is_reverted(make_site: MakeSite, tmp_path: Path) -> None:
    """Each environment's python is its own wrapper, so that what ran is seen; the broken one dies at boot."""
    for name, first in (
        ("one", ""),
        ("two", ""),
        ("broken", 'case "$*" in *" serve "*) echo "ImportError: no such symbol" >&2; exit 1;; esac\n'),
    ):
        program = tmp_path / name / "bin" / "lb"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\n{first}PACKAGE={name} exec {sys.executable} "$@"\n')
        program.chmod(0o755)
    site = Site(tmp_path / "s")
    try:
        file = site.folder / "services" / "node0.toml"
        file.write_text(file.read_text().replace(json.dumps(sys.executable), json.dumps(str(tmp_path / "one/bin/lb")), 1))
        site.start()
        ran = site.apply("--package", str(tmp_path / "broken"))
        assert ran.code == 3 and "ImportError: no such symbol" in ran.data["why"], ran.err
        assert package(site) == "one"
        ran = site.apply("--package", str(tmp_path / "two"))
        assert ran.code == 0, ran.err
        assert package(site) == "two"
        assert site.rollout("plan", "--package", str(tmp_path / "three")).code == 2
    finally:
        site.close()


def package(site: Site) -> str:
    environ = Path(f"/proc/{site.services[0].snapshot().main_pid}/environ").read_text().split("\0")
    return next(one.partition("=")[2] for one in environ if one.startswith("PACKAGE="))
