"""A number of a command line that is none is refused by its option's name."""

from __future__ import annotations

import pytest

from monitors import finite


@pytest.mark.parametrize("args", [["--lease-s", "nan"], ["apply", "--stable-s=NaN"], ["--rate", "inf"], ["--x-s", "-Infinity"]])
def test_what_never_comes_is_refused(args: list[str]) -> None:
    assert finite.problem(args).startswith("--")


@pytest.mark.parametrize(
    "args", [[], ["--lease-s", "60"], ["--reason", "nan"], ["--set", "grammar-backend=none"], ["nan"], ["--a", "nancy"]]
)
def test_other_words_are_left_to_the_command(args: list[str]) -> None:
    assert finite.problem(args) == ""
