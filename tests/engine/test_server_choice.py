"""An answer's text, count and end are the same however the scheduler cuts its messages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import TokenLogprob, Tokens
from engine.server.choice import Choice
from engine.text.tokenizer import Tokenizer
from tests.tiny_models import tiny_model

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_model(tmp_path_factory.mktemp("model")))


def grow(choice: Choice, ids: list[int], cuts: list[int], finish: str = "length") -> tuple[str, list[int]]:
    """Feed ``ids`` cut at ``cuts``, until it ends. Its text, and the offsets of its log-probabilities."""
    text, offsets = "", []
    edges = sorted({cut % (len(ids) + 1) for cut in cuts} | {0, len(ids)})
    for start, end in itertools.pairwise(edges):
        part, last = ids[start:end], end == len(ids)
        message = Tokens(rid="r", ids=part, logprobs=[TokenLogprob(token, -1.0) for token in part])
        if last:
            message.finish = finish  # type: ignore[assignment]
            message.matched = part[-1] if finish == "stop" else None
        piece = choice.feed(message)
        text += piece.text
        offsets += [token.offset for token in piece.tokens]
        if choice.finish:
            break
    return text, offsets


@settings(deadline=None, max_examples=60)
@given(text=st.text(min_size=1, max_size=20), cuts=st.lists(st.integers(0, 100), max_size=6), stop=st.text(min_size=1, max_size=3))
def test_every_cut_gives_the_same_answer(tokenizer: Tokenizer, text: str, cuts: list[int], stop: str) -> None:
    text += stop + "after"
    ids = tokenizer.encode(text)
    expected = text[: text.index(stop)]
    whole, cut = Choice(tokenizer, stops=[stop]), Choice(tokenizer, stops=[stop])
    assert grow(whole, ids, []) == grow(cut, ids, cuts)
    assert (whole.used, whole.finish, whole.matched) == (cut.used, cut.finish, cut.matched) == (whole.used, "stop", stop)
    assert grow(Choice(tokenizer, stops=[stop]), ids, cuts)[0] == expected


def test_the_stop_token_is_counted_and_is_not_text(tokenizer: Tokenizer) -> None:
    choice = Choice(tokenizer)
    ids = tokenizer.encode("Hi")
    letter = tokenizer.encode("!")[0]
    assert grow(choice, [*ids, letter], [], finish="stop")[0] == "Hi"  # a stop_token_id that has text of its own
    assert (choice.used, choice.finish, choice.matched) == (len(ids) + 1, "stop", letter)


def test_a_stop_string_does_not_end_an_answer_before_its_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x1x2x3")
    assert len(ids) == 6
    choice = Choice(tokenizer, stops=["x"], min_tokens=3)
    assert grow(choice, ids, [])[0] == "x1x2"
    assert choice.used == 5


def test_text_held_back_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    choice = Choice(tokenizer, stops=["abc"])
    assert grow(choice, tokenizer.encode("xab"), [1, 2])[0] == "xab"
    assert choice.finish == "length"


def test_half_a_character_at_the_end_is_a_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    assert grow(Choice(tokenizer), ids[:1], [])[0] == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), 1]
    assert grow(Choice(tokenizer), ids, [])[0] == "a"
    assert grow(Choice(tokenizer, skip_special=False), ids, [])[0] == "a<|im_start|>"
