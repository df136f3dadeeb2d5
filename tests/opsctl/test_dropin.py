from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsctl.service import dropin
from opsctl.service.manager import Override, ServiceError

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@given(st.lists(TEXT, min_size=1, max_size=5), st.dictionaries(st.from_regex(r"[A-Z_]{1,5}", fullmatch=True), TEXT, max_size=3))
def test_an_override_is_read_back_exactly_and_every_setting_is_one_line(argv: list[str], env: dict[str, str]) -> None:
    override = Override(tuple(argv), env)
    text = dropin.render(override)
    assert dropin.parse(text, "x") == override
    settings = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert settings[:2] == ["[Service]", "ExecStart="]
    assert len(settings) == 3 + len(env)


@given(TEXT)
def test_undoing_the_dollars_of_an_argument_gives_it_back(argument: str) -> None:
    assert dropin.unescape(argument.replace("$", "$$"), "x") == argument


def test_quotes_percent_and_dollar_are_escaped_and_a_variable_keeps_its_dollar() -> None:
    assert dropin.quote('{"a": "100%"}$X') == '"{\\"a\\": \\"100%%\\"}$$X"'
    assert dropin.quote("A=$X%", expands=False) == '"A=$X%%"'


def test_a_nul_cannot_be_carried() -> None:
    with pytest.raises(ServiceError, match="NUL"):
        dropin.render(Override(("a\0b",), {}))
