"""Flags are held against the target build's own --help, run for real."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from opsctl.rollout import buildhelp
from opsctl.rollout.flags import Edit, EditError
from opsctl.service.embedded import EmbeddedService
from opsctl.service.manager import ServiceError

BUILD = """
import argparse
parser = argparse.ArgumentParser(prog="engine")
for flag in ("--model-path", "--tp-size", "--grammar-backend", "--port", "--mem-fraction-static"):
    parser.add_argument(flag)
parser.add_argument("--cuda-graph", action=argparse.BooleanOptionalAction)
parser.parse_args()
"""


@pytest.fixture
def service(tmp_path: Path) -> EmbeddedService:
    (tmp_path / "build.py").write_text(BUILD)
    (tmp_path / "s.toml").write_text(f"argv = ['{sys.executable}', '{tmp_path}/build.py', '--model-path', 'm']\n")
    return EmbeddedService(tmp_path, "s", {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})


def test_a_flag_that_the_build_does_not_know_is_refused_with_what_was_meant(service: EmbeddedService) -> None:
    argv = service.command().argv
    buildhelp.refuse_unknown(service, argv, [Edit("grammar-backend", "none"), Edit("no-cuda-graph"), Edit("tp_size", "2")])
    with pytest.raises(EditError, match=r"--set grammar-backnd=none: .* knows no --grammar-backnd; did you mean --grammar-backend\?"):
        buildhelp.refuse_unknown(service, argv, [Edit("grammar-backnd", "none")])
    buildhelp.refuse_unknown(service, argv, [Edit("gone-since", unset=True)])


def test_a_build_that_names_no_flags_is_not_taken_for_one_that_knows_none(service: EmbeddedService) -> None:
    with pytest.raises(ServiceError, match="names no flags"):
        buildhelp.refuse_unknown(service, ("/bin/true",), [Edit("x")])


def test_both_words_of_a_switch_that_can_be_negated_are_known() -> None:
    assert {"async-x", "no-async-x"} <= buildhelp.known("  --[no-]async-x  run it beside")
