"""Stop strings in a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stops import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    machine = StopStrings(stops)
    text, matched = "", None
    for piece in pieces:
        out, matched = machine.feed(piece)
        text += out
        if matched is not None:
            return text, matched
    return text + machine.finish(), matched


@given(st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.text("abc", max_size=5), max_size=8))
def test_any_cut_gives_what_reading_character_by_character_defines(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    expected: tuple[str, str | None] = (whole, None)
    for end in range(len(whole) + 1):
        ended = [stop for stop in stops if whole[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            expected = (whole[: end - len(longest)], longest)
            break
    assert run(stops, pieces) == expected
    assert run(stops, list(whole)) == expected


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    machine = StopStrings(["\n\nUser:", "###"])
    assert machine.feed("Hello\n") == ("Hello", None)
    assert machine.feed("\nUs") == ("", None)
    assert machine.feed("ual #") == ("\n\nUsual ", None)
    assert machine.finish() == "#"


def test_nothing_follows_a_match() -> None:
    machine = StopStrings(["stop"])
    assert machine.feed("a stop b") == ("a ", "stop")
    assert machine.feed("more") == ("", "stop")
    assert machine.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])
