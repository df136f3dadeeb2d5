"""Another model, another package: rolled out on a real process, with the old one still there to go back to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.opsctl.site import Site


def test_another_package_and_another_model_are_rolled_out_or_taken_back_and_both_must_be_there(tmp_path: Path) -> None:
    """Each environment's program is a wrapper of its own, so that what ran is seen; the broken one dies at boot."""
    broken = 'case "$*" in *" serve "*) echo "ImportError: no such symbol" >&2; exit 1;; esac\n'
    for name, first in (("one", ""), ("two", ""), ("broken", broken)):
        program = tmp_path / name / "bin" / "lb"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\n{first}PACKAGE={name} exec {sys.executable} "$@"\n')
        program.chmod(0o755)
    models = [tmp_path / "model-1", tmp_path / "model-2"]
    for model in models:
        model.mkdir()
    site = Site(tmp_path / "s", args=["--model", str(models[0])])
    try:
        file = site.folder / "services" / "node0.toml"
        file.write_text(file.read_text().replace(json.dumps(sys.executable), json.dumps(str(tmp_path / "one/bin/lb")), 1))
        site.start()
        ran = site.apply("--package", str(tmp_path / "broken"))
        assert ran.code == 3 and "ImportError: no such symbol" in ran.data["why"], ran.err
        assert package(site) == "one"
        ran = site.apply("--package", str(tmp_path / "two"), "--model", str(models[1]))
        assert ran.code == 0, ran.err
        assert package(site) == "two" and site.running[0][-2:] == ["--model", str(models[1])]
        models[1].rmdir()
        ran = site.rollout("plan", "--package", str(tmp_path / "three"), "--model", str(models[0]))
        assert ran.code == 2
    finally:
        site.close()


def package(site: Site) -> str:
    environ = Path(f"/proc/{site.services[0].snapshot().main_pid}/environ").read_text().split("\0")
    return next(one.partition("=")[2] for one in environ if one.startswith("PACKAGE="))
