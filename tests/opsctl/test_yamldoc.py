"""YAML that somebody broke, by accident or not: a problem with its line, never a traceback and never a wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from opsctl import textfile, yamldoc
from opsctl.load import shapes
from opsctl.playbooks.document import PlaybookError, parse
from opsctl.runbooks import document as runbook

BOMB = 'a: &a ["x","x","x","x","x","x","x","x","x"]\n' + "".join(
    f"{c}: &{c} [{','.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)
BROKEN = {
    "date": ("x: 1\nname: 2020-13-45\n", 2),
    "integer": ("name: !!int abc\n", 1),
    "digits": (f"name: {'9' * 5000}\n", 1),
    "time": ("name: !!timestamp abc\n", 1),
    "character": ('name: "\x07"\n', 1),
    "bomb": (BOMB, 1),
    "deep": ("a: " + "[" * 3000 + "]" * 3000, 1),
    "itself": ("a: &a [*a]\n", 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_told_with_its_line_by_every_reader(name: str, tmp_path: Path) -> None:
    text, line = BROKEN[name]
    with pytest.raises(yaml.YAMLError) as told:
        yamldoc.load(text)
    assert yamldoc.said(told.value)
    with pytest.raises(PlaybookError) as playbook:
        parse(text, "x.yaml")
    assert playbook.value.problems[0].text.startswith("not YAML: ")
    if name not in ("bomb", "deep", "itself"):
        assert playbook.value.problems[0].line == line
    with pytest.raises(runbook.RunbookError, match="front matter: "):
        runbook.parse(f"---\n{text}\n---\n# x\n", "x.md")
    (tmp_path / "shapes.yaml").write_text(text)
    with pytest.raises(shapes.ShapeError, match=r"shapes.yaml: "):
        shapes.load(tmp_path / "shapes.yaml")


def test_aliases_that_come_to_little_are_welcome() -> None:
    assert yamldoc.load("a: &a [1, 2]\nb: [*a, *a]\n")[1] == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(OSError, match="more than"):
        textfile.read(Path("/dev/zero"))
