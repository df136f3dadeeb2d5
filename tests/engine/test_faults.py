"""What faults do to what they are given, without a rank."""

from __future__ import annotations

import pytest

from engine.faults import FaultError, Faults
from engine.text.events import Content, ParseFailure, ToolCallStart
from engine.text.stream_parser import StreamParser
from engine.text.toolcalls import HermesParser

OWN = [ord("x")] * 200


def faults(*specs: str) -> Faults:
    """Of rank 0, with a tokenizer in which a character is a token."""
    made = Faults(0, specs)
    made.encode = lambda text: [ord(char) for char in text]
    made.ready = True
    return made


def told(armed: Faults, sizes: list[int], rid: str = "r") -> list[int]:
    """An answer of the model's own that comes in messages of such sizes."""
    found: list[int] = []
    for at, size in enumerate(sizes):
        found += armed.told(rid, OWN[:size], 1000, last=at == len(sizes) - 1)
    return found


@pytest.mark.parametrize("sizes", [[200], [1] * 200, [3, 90, 107]])
def test_a_call_in_foreign_markup_fails_in_the_real_parser_and_reaches_the_client_as_text(sizes: list[int]) -> None:
    ids = told(faults("answers.markup"), sizes)
    assert len(ids) == len(OWN), "as many tokens as were drawn"
    parser = StreamParser(None, HermesParser())
    events = [event for token in ids for event in parser.feed(chr(token))] + parser.finish()
    assert len([event for event in events if isinstance(event, ParseFailure)]) == 1
    assert not any(isinstance(event, ToolCallStart) for event in events)
    content = "".join(event.text for event in events if isinstance(event, Content))
    assert content.startswith("<function=look_up>") and content.endswith("xxx")


def test_each_answer_has_the_call_at_its_beginning_whatever_else_is_told_beside_it() -> None:
    armed = faults("answers.markup")
    first, second = told(armed, [10, 190], "a"), armed.told("b", OWN[:30], 1000, last=False)
    assert second == first[:30]
    assert told(armed, [200], "a") == first, "the next answer, under a name that was used before"


def test_nothing_is_in_an_answer_before_it_is_armed_and_after_it_is_lifted() -> None:
    armed = faults()
    assert told(armed, [200]) == OWN
    armed.arm("answers.markup")
    assert told(armed, [200]) != OWN
    armed.disarm("answers.markup")
    assert told(armed, [200]) == OWN


def test_it_takes_no_parameter() -> None:
    with pytest.raises(FaultError, match="no parameter 'rate'"):
        faults("answers.markup:rate=1")
