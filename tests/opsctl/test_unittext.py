"""What a unit's text says is read as systemd reads it, or refused with its line. Pure."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsctl.service import dropin, unittext
from opsctl.service.manager import Override, ServiceError

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


def read(text: str, unit: str = "lb@flash.service") -> unittext.Text:
    return unittext.read([("lb.service", text)], unit)


@given(st.lists(TEXT.filter(lambda word: word != ";"), min_size=1, max_size=5).filter(lambda argv: argv[0][:1] not in list("@-:+!|")),
       st.dictionaries(st.from_regex(r"[A-Z_]{1,5}", fullmatch=True), TEXT, max_size=3))  # fmt: skip
def test_what_a_drop_in_of_ours_says_is_read_back(argv: list[str], env: dict[str, str]) -> None:
    found = read(dropin.render(Override(tuple(argv), env)))
    assert found.argv == tuple(argv) and found.env == env


def test_lines_go_on_sections_part_and_later_files_win() -> None:
    unit = "[Unit]\nExecStart=/not/this\n[Service]\n# a word\nExecStart=/bin/serve \\\n  # inside\n"
    unit += "  --name %i \\\n  '--json {\"a\": 1}' --x\\x20y\n"
    unit += 'Environment=A=1 "B=two words"\nEnvironment=C=%%\nKillMode=mixed\n'
    site = "[Service]\nEnvironment=A=2\nKillMode=control-group\n"
    found = unittext.read([("u", unit), ("d", site)], "lb@flash.service")
    assert found.argv == ("/bin/serve", "--name", "flash", '--json {"a": 1}', "--x y")
    assert found.env == {"A": "2", "B": "two words", "C": "%"} and found.settings["KillMode"] == "control-group"
    assert unittext.read([("u", unit), ("d", "[Service]\nExecStart=\nExecStart=/b\nEnvironment=\n")], "u.service").argv == ("/b",)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("ExecStart=/bin/serve --home %h", "only known on the machine"),
        ("ExecStart=/bin/serve $ARGS", "only known once it runs"),
        ("ExecStart=-/bin/serve", "begins with '-'"),
        ("ExecStart=/bin/a ; /bin/b", "several commands"),
        ("ExecStart=/bin/a\nExecStart=/bin/b", "second ExecStart"),
        ('ExecStart=/bin/a "b', "never closed"),
        ("ExecStart=/bin/a \\q", "no escape"),
        ("KillMode mixed", "no equals sign"),
    ],
)
def test_what_cannot_be_told_beforehand_is_refused_with_its_line(line: str, word: str) -> None:
    with pytest.raises(ServiceError, match=word) as refused:
        read(f"[Service]\n{line}\n")
    assert str(refused.value).startswith("lb.service:")


def test_settings_that_no_rollout_can_guard_are_named() -> None:
    found = read("[Service]\nType=oneshot\nKillMode=none\nStandardOutput=file:/x\n").problems()
    assert [word for line in found for word in ("ExecStart", "KillMode=none", "StandardOutput", "oneshot") if word in line] == [
        "ExecStart", "KillMode=none", "StandardOutput", "oneshot",
    ]  # fmt: skip
    assert read("[Service]\nType=notify\nExecStart=/bin/serve\n").problems() == []


def test_the_packaged_unit_is_read_where_the_machines_folders_are_known() -> None:
    """They are the same for every system unit; a user's are not."""
    text = (Path(__file__).parents[2] / "engine/launch/lastbatch@.service").read_text()
    found = unittext.read([("lastbatch@.service", text)], "lastbatch@flash.service", {"C": "/var/cache"})
    assert found.argv[-2:] == ("--name", "flash") and found.env["XDG_CACHE_HOME"] == "/var/cache" and found.problems() == []
    with pytest.raises(ServiceError, match="%C is only known"):
        read(text)
