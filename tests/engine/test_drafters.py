"""The n-gram drafter against a definition that reads the whole text each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.drafters import NgramDrafter, NullDrafter


def defined(tokens: list[int], least: int, most: int, k: int) -> list[int]:
    for size in range(most, least - 1, -1):
        suffix = tokens[len(tokens) - size :]
        if size > len(tokens):
            continue
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == suffix:
                text = list(tokens)
                for at in range(end, end + k):
                    text.append(text[at])
                return text[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 6),
)
def test_drafts_are_what_followed_the_last_occurrence_of_the_longest_suffix(
    tokens: list[int], cuts: list[int], least: int, more: int, k: int
) -> None:
    drafter = NgramDrafter(least, least + more)
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    for start, end in zip([0, *ends], ends, strict=False):
        drafter.extend(tokens[start:end])
        assert drafter.propose(k) == (defined(tokens[:end], least, least + more, k) if k else [])


def test_a_repetition_goes_on_beyond_the_end_of_the_text() -> None:
    drafter = NgramDrafter(2, 5)
    drafter.extend([7, 1, 2, 3, 1, 2, 3])
    assert drafter.propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_proposing_changes_nothing() -> None:
    drafter = NgramDrafter(1, 2)
    drafter.extend([1, 2, 1])
    assert drafter.propose(3) == drafter.propose(3) == [2, 1, 2]


def test_the_null_drafter_never_guesses_and_bad_sizes_are_refused() -> None:
    null = NullDrafter()
    null.extend([1, 1, 1])
    assert null.propose(4) == []
    with pytest.raises(ValueError, match="min_match"):
        NgramDrafter(3, 2)
    with pytest.raises(ValueError, match="min_match"):
        NgramDrafter(0, 2)
