"""A patched file mounted over another, proven in the process's own mount namespace, shown until it is removed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.opsctl.site import Site

MakeSite = Callable[..., Site]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to mount a file needs root")


def test_an_overlay_is_seen_by_the_process_alone_shown_by_status_and_removed_again(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site()
    target, patch = tmp_path / "module.py", tmp_path / "patched.py"
    target.write_text("old\n")
    patch.write_text("new\n")
    sha = hashlib.sha256(b"new\n").hexdigest()
    plan = site.rollout("plan", "--overlay", f"{patch}={target}").data
    assert f"+{target} is {site.folder}/state/opsctl/kept/{sha[:16]}-module.py" in plan["diff"]
    ran = site.apply("--overlay", f"{patch}={target}")
    assert ran.code == 0, ran.err
    overlays = next(check for check in ran.data["checks"] if check["name"] == "overlays")
    (sums,) = overlays["data"].values()
    assert overlays["outcome"] == "passed" and set(sums.values()) == {sha}
    assert target.read_text() == "old\n"
    assert (Path(f"/proc/{site.services[0].snapshot().main_pid}/root") / str(target)[1:]).read_text() == "new\n"
    (shown,) = site.rollout("status").data["services"][0]["overlays"]
    assert shown["target"] == str(target) and shown["sha256"] == sha[:16] and shown["seen"] == "1 of 1 processes read it"
    assert site.apply("--remove-overlay", str(target)).code == 0
    assert site.rollout("status").data["services"][0]["overlays"] == []
    assert (Path(f"/proc/{site.services[0].snapshot().main_pid}/root") / str(target)[1:]).read_text() == "old\n"


def test_files_that_are_not_there_are_refused(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site()
    ran = site.apply("--overlay", f"{tmp_path}/none={tmp_path}/x")
    assert ran.code == 2 and "No such file" in ran.errors[0]["message"]
    (tmp_path / "patch").write_text("x")
    ran = site.rollout("plan", "--overlay", f"{tmp_path}/patch={tmp_path}/nothing")
    assert ran.code == 2 and "to mount over" in ran.errors[0]["message"]
    ran = site.rollout("plan", "--remove-overlay", "/nothing/there")
    assert ran.code == 2 and "none at all" in ran.errors[0]["message"]
