"""Incremental detokenising against one-shot decoding, for each kind of vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, byte_fallback, byte_level

from engine.text.detokenizer import REPLACEMENT, Detokenizer


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_in_any_pieces_give_the_text_of_one_decoding(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=6))
    machine = Detokenizer(tokenizer, skip_special=skip)
    text = "".join(machine.feed(piece) for piece in pieces(ids, cuts)) + machine.finish()
    assert text == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=30))
@example(text="héllo 👩‍👩‍👧 \N{FULLWIDTH VERTICAL LINE} ok\n")
@settings(max_examples=100, deadline=None)
def test_no_half_character_comes_out_of_a_whole_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    if REPLACEMENT in text:
        return
    ids = tokenizer.encode(text)
    expected = tokenizer.decode(ids)
    machine = Detokenizer(tokenizer)
    given_out = ""
    for token in ids:
        piece = machine.feed([token])
        assert REPLACEMENT not in piece
        given_out += piece
        assert expected.startswith(given_out)
    assert given_out + machine.finish() == expected


def test_a_character_that_is_never_completed_shows_at_the_end_only() -> None:
    tokenizer = byte_level()
    half = tokenizer.encode("é")[:1]
    machine = Detokenizer(tokenizer)
    assert machine.feed(half) == ""
    assert machine.finish() == REPLACEMENT


def test_text_comes_out_as_soon_as_it_is_certain() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.encode(piece)[-1] for piece in ("the", "x")]
    machine = Detokenizer(tokenizer)
    assert [machine.feed([token]) for token in ids] == [tokenizer.token_text(token) for token in ids]
    tokenizer = byte_level()
    machine = Detokenizer(tokenizer)
    ids = tokenizer.encode("plain text")
    assert [machine.feed([token]) for token in ids] == [tokenizer.token_text(token) for token in ids]


def test_a_run_of_byte_tokens_waits_because_its_last_byte_decides_how_all_of_it_reads() -> None:
    tokenizer = byte_fallback()
    machine = Detokenizer(tokenizer)
    sun = tokenizer.encode("世")
    assert "".join(machine.feed([token]) for token in sun[1:]) == ""
    assert machine.feed(tokenizer.encode("x")[-1:]) == "世x"
