"""Variables in the command line of a document, and what a lint makes of them."""

from __future__ import annotations

import pytest

from opsctl import commandline

WATCH = 'opsctl callers watch --fleet "$FLEET" --for "${WATCH_S:-600}"'


@pytest.mark.parametrize(("values", "seconds"), [({}, "600"), ({"WATCH_S": "20"}, "20"), ({"WATCH_S": ""}, "600")])
def test_a_variable_with_a_default_needs_no_value_and_takes_one(values: dict[str, str], seconds: str) -> None:
    words = commandline.filled(WATCH, {"FLEET": "/a fleet.toml", **values})
    assert words == ["opsctl", "callers", "watch", "--fleet", "/a fleet.toml", "--for", seconds]


def test_a_default_is_checked_as_a_value_would_be() -> None:
    assert commandline.problem(WATCH) == ""
    assert "Invalid value for '--for'" in commandline.problem(WATCH.replace("600", "long"))


def test_a_variable_without_one_is_named() -> None:
    with pytest.raises(ValueError, match="FLEET: no value"):
        commandline.filled(WATCH, {"DEPLOYMENT": "flash"})
