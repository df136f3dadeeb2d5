"""Where a command's words go: pipes that are closed, disks that are full, names that are no UTF-8, numbers that are none."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from monitors import keyfile
from monitors.exit_codes import ExitCode
from opsctl import cli
from opsctl.answer import Answer, Session
from opsctl.load.address import address


def session(stdout: io.TextIOBase, stderr: io.TextIOBase | None = None) -> Session:
    return Session({}, io.StringIO(), stdout, stderr or io.StringIO())  # type: ignore[arg-type]


def test_whoever_closed_the_pipe_has_seen_enough_and_talk_goes_nowhere() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        heard = session(closed)
        heard.show(Answer("x", [1], "text", ExitCode.FOUND), as_json=False)
        assert heard.exit_code is ExitCode.FOUND
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as closed:
        session(io.StringIO(), closed).talk("what is under way goes on")
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), closed.fileno())


def test_what_cannot_be_written_is_an_error() -> None:
    said = io.StringIO()
    with Path("/dev/full").open("w") as full:
        heard = session(full, said)
        heard.show(Answer("x", [1], "text"), as_json=True)
    assert heard.exit_code is ExitCode.INTERNAL and "No space left" in said.getvalue()


def test_a_number_that_is_none_is_null_in_the_envelope() -> None:
    out = io.StringIO()
    session(out).show(Answer("x", {"a": [float("inf"), 1.5, (float("nan"),)]}), as_json=True)
    assert json.loads(out.getvalue(), parse_constant=pytest.fail)["data"] == {"a": [None, 1.5, [None]]}


def test_a_name_that_is_no_utf8_is_shown_as_far_as_it_goes() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "opsctl.cli", "bundle", "verify", b"/no/such/\xff"], capture_output=True, timeout=60, env={**os.environ}
    )
    assert ran.returncode == 2 and b"no such bundle" in ran.stderr and b"Traceback" not in ran.stderr


def test_an_envelope_names_the_command_and_none_of_its_arguments() -> None:
    for words, name in ((("triage", "/no/such"), "triage"), (("bundle", "verify", "/no/such"), "bundle verify"), (("nix", "x"), "nix")):
        out = io.StringIO()
        assert cli.main([*words, "--json"], {}, stdin=io.StringIO(), stdout=out, stderr=io.StringIO()) == 2
        assert json.loads(out.getvalue())["command"] == name


def test_a_defect_is_told_in_the_envelope(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("something nobody thought of")

    monkeypatch.setattr(cli, "_version", broken)
    out, err = io.StringIO(), io.StringIO()
    assert cli.main(["version", "--json"], {}, stdin=io.StringIO(), stdout=out, stderr=err) == 1
    assert json.loads(out.getvalue())["errors"][0]["message"] == "RuntimeError: something nobody thought of"
    assert "Traceback" in err.getvalue()


def test_what_is_no_key_is_told_without_it(tmp_path: Path) -> None:
    for content in (b"secret-one\nsecret-two", "secret-\xe9".encode(), b"secret-\xff", b"secret-" * 2000):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(OSError, match="holds no key") as told:
            keyfile.read(tmp_path / "key")
        assert "secret" not in str(told.value)
    (tmp_path / "key").write_text("sk-1\n")
    assert keyfile.read(tmp_path / "key") == "sk-1"


def test_an_address_is_one_and_holds_no_secret() -> None:
    for url in ("http://127.0.0.1:30000", "https://host/v1", "", "$URL"):
        assert address(url) == url
    for url in (
        "garbage",
        "http://",
        "http://[::1",
        "ftp://x",
        "http://h:99999",
        "http://h:x",
        "http://me:word@h",
        "http://h/?key=word",
        "http://xn--",
    ):
        with pytest.raises(typer.BadParameter) as told:
            address(url)
        assert "word" not in str(told.value)
