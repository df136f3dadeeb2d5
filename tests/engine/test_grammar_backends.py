"""Grammars end to end: admission, compiling under a deadline, masks, and answers that follow their schema."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import EOS_ID, tiny_model

from engine.exec.sampler import SamplingRow, sample
from engine.grammar.backends import NOT_SUPPORTED, Compiled, GrammarError, Matcher, grammar_key, open_backend
from engine.grammar.masks import allocate_mask, allowed_tokens, apply_masks, set_only
from engine.grammar.xgrammar_backend import XgrammarBackend
from engine.messages import Grammar, GrammarKind, Sampling
from engine.text.tokenizer import Tokenizer

VOCAB = 600  # wider than the tokenizer's 512
EOS = (0, EOS_ID)
DEADLINE_S = 30.0

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[XgrammarBackend]:
    made = XgrammarBackend(folder, vocab_size=VOCAB, eos_ids=EOS, compile_timeout_s=DEADLINE_S, max_whitespace=2)
    yield made
    made.close()


def wait(backend: Any, keys: set[str]) -> dict[str, Compiled]:
    done: dict[str, Compiled] = {}
    until = time.monotonic() + DEADLINE_S
    while not keys <= set(done):
        assert time.monotonic() < until, f"no answer for {keys - set(done)}"
        done.update({one.key: one for one in backend.poll()})
        threading.Event().wait(0.002)
    return done


def compiled(backend: Any, kind: GrammarKind, text: str = "") -> Compiled:
    grammar = Grammar(kind, text)
    key = grammar_key(grammar)
    backend.submit(key, grammar)
    return wait(backend, {key})[key]


def matcher(backend: XgrammarBackend, kind: GrammarKind, text: str = "") -> Matcher:
    done = compiled(backend, kind, text)
    assert done.ok, done.error
    return backend.matcher(done.key)


def allowed(one: Matcher, drafts: list[int] | None = None) -> list[list[int]]:
    out = allocate_mask(1 + len(drafts or []), VOCAB)
    out.fill_(0b1010101)  # what a reused buffer may hold
    one.masks(drafts or [], out)
    return [allowed_tokens(row, VOCAB) for row in out]


def follow(
    one: Matcher, logits: Callable[[int], torch.Tensor], draft: Callable[[list[int]], list[int]], seed: int, most: int = 300
) -> list[int]:
    """Decode with verify steps: the loop of the executor in small."""
    tokens: list[int] = []
    while not one.terminated and len(tokens) < most:
        drafts = draft(tokens)
        masks = allocate_mask(1 + len(drafts), VOCAB)
        one.masks(drafts, masks)
        rows = [
            SamplingRow(Sampling(seed=seed, max_tokens=most), len(tokens) + at, tokens, 0, drafts[:at]) for at in range(1 + len(drafts))
        ]
        drawn = sample(torch.stack([logits(len(tokens) + at) for at in range(1 + len(drafts))]), rows, masks).tokens
        accepted = next((at for at, token in enumerate(drafts) if drawn[at] != token or token in EOS), len(drafts))
        run = drawn[: accepted + 1]
        assert one.advance(run) == len(run)
        tokens += run
    return tokens


def noise(seed: int) -> Callable[[int], torch.Tensor]:
    def logits(position: int) -> torch.Tensor:
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed * 1000 + position))

    return logits


SCHEMAS: list[Any] = [
    PERSON,
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2,
     "propertyNames": {"maxLength": 3}},
    {"type": "array", "minItems": 1, "maxItems": 3,
     "items": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 20}, {"type": "string", "pattern": r"^[a-c]{2}\d$"}]}},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False},
    {"enum": ["x\n\"\u0001", 1, None, {"z": [1], "a": 2}]},
    {"type": "object", "properties": {'a"b\\': {"type": "null"}, "é": {"type": "string", "format": "ipv4"}}, "required": ['a"b\\', "é"]},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "number", "minimum": -3, "maximum": 2.5},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
@pytest.mark.parametrize("seed", range(3))
def test_random_logits_under_a_schema_give_answers_that_satisfy_it(
    backend: XgrammarBackend, tokenizer: Tokenizer, schema: Any, seed: int
) -> None:
    tokens = follow(matcher(backend, "json_schema", json.dumps(schema)), noise(seed), lambda _: [], seed)
    assert tokens[-1] in EOS
    answer = tokenizer.decode(tokens)
    jsonschema.validate(json.loads(answer), schema)
    # Twice the limit: the compiler has two places for white space inside empty brackets.
    assert not re.search(r"\s{5}", re.sub(r'"(?:[^"\\]|\\.)*"', '""', answer)), "more white space than --grammar-max-whitespace"


def test_properties_come_in_the_order_of_the_schema(backend: XgrammarBackend, tokenizer: Tokenizer) -> None:
    tokens = follow(matcher(backend, "json_schema", json.dumps(PERSON)), noise(0), lambda _: [], 0)
    assert list(json.loads(tokenizer.decode(tokens))) == list(PERSON["properties"])


@given(seed=st.integers(0, 50), wrong=st.lists(st.integers(0, VOCAB - 1), max_size=5), right=st.integers(0, 5))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drafts_good_and_bad_never_change_the_answer(backend: XgrammarBackend, seed: int, wrong: list[int], right: int) -> None:
    text = json.dumps(PERSON)
    plain = follow(matcher(backend, "json_schema", text), noise(seed), lambda _: [], seed)
    drafted = follow(
        matcher(backend, "json_schema", text),
        noise(seed),
        lambda tokens: plain[len(tokens) : len(tokens) + right] + wrong,
        seed,
        most=len(plain),
    )
    assert drafted[: len(plain)] == plain


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_mask_row_is_what_a_matcher_that_took_the_drafts_would_allow(backend: XgrammarBackend, data: st.DataObject) -> None:
    grammar = 'root ::= "ab" [a-c]{0,3} ("," root)? "."'
    one, probe = matcher(backend, "ebnf", grammar), matcher(backend, "ebnf", grammar)
    taken: list[int] = data.draw(st.integers(0, 4).map(lambda size: walk(probe, size)))
    one.advance(taken)
    drafts: list[int] = []
    expected: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 6))):
        expected += allowed(probe)
        token = data.draw(st.one_of(st.sampled_from(expected[-1]), st.integers(0, VOCAB - 1)))
        if token not in expected[-1]:
            drafts += [token, 50, 60]
            break
        drafts.append(token)
        probe.advance([token])
    else:
        drafts.pop()
    for attempt in ("first", "again, so the state is as before"):
        rows = allowed(one, drafts)
        assert rows[: len(expected)] == expected, attempt
        assert all(rows), "an empty row would make every logit -inf"


def walk(one: Matcher, size: int) -> list[int]:
    """Advance by the first allowed token each time."""
    taken = []
    for _ in range(size):
        taken.append(allowed(one)[0][0])
        one.advance(taken[-1:])
    return taken


def test_the_end_is_allowed_only_where_the_grammar_is_complete_and_special_or_unknown_tokens_never(
    backend: XgrammarBackend, tokenizer: Tokenizer
) -> None:
    one = matcher(backend, "json_schema", '{"type": "string", "minLength": 2, "maxLength": 3}')
    for text, complete in (('"', False), ("a", False), ("b", False), ('"', True)):
        (may,) = allowed(one)
        assert not set(may) & {*EOS, *tokenizer.special_ids, *range(tokenizer.vocab_size, VOCAB)}
        assert one.advance(tokenizer.encode(text)) == 1
        assert (set(allowed(one)[0]) == set(EOS)) is complete
    assert not one.terminated
    assert one.advance([EOS_ID, 50, 60]) == 1
    assert one.terminated
    assert one.advance([70]) == 0


@pytest.mark.parametrize("limits", [{"maxLength": 5}, {"minLength": 1}, {}, {"pattern": r"[^a]*"}, {"pattern": r"\W*"}])
def test_no_control_character_comes_raw_into_a_json_string(backend: XgrammarBackend, tokenizer: Tokenizer, limits: dict[str, Any]) -> None:
    one = matcher(backend, "json_schema", json.dumps({"type": "string", **limits}))
    one.advance(tokenizer.encode('"'))
    (may,) = allowed(one)
    assert may
    assert not [token for token in may if any(byte < 0x20 for byte in tokenizer.token_bytes(token))]


def test_after_the_end_rows_allow_the_end_and_are_never_empty(backend: XgrammarBackend, tokenizer: Tokenizer) -> None:
    one = matcher(backend, "regex", "ab")
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    rows = allowed(one, [a, b, EOS_ID, a, b])
    assert rows[2] == list(EOS)
    assert rows[3] == list(EOS)
    assert all(rows)
    one.advance([a, b, EOS_ID])
    assert allowed(one, [a, b]) == [list(EOS)] * 3


def test_a_token_outside_the_grammar_is_an_error_and_not_swallowed(backend: XgrammarBackend, tokenizer: Tokenizer) -> None:
    one = matcher(backend, "regex", "[0-9]+")
    with pytest.raises(GrammarError, match="its mask was not applied"):
        one.advance(tokenizer.encode("x"))


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", '{"a": [1, {"b": null}]}', "[1]"),
        ("regex", r"\d{3}-[a-f]+", "123-abc", "12-abc"),
        ("ebnf", 'root ::= item ("," item)*\nitem ::= [a-z]+', "a,bc", "a,,b"),
        ("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 2}', "[1, 2]", "[1, 2, 3]"),
        ("json_schema", "true", '"anything"', "nothing"),
        (
            "structural_tag",
            json.dumps({
                "type": "structural_tag",
                "format": {"type": "tag", "begin": "<f>", "end": "</f>",
                           "content": {"type": "json_schema", "json_schema": {"type": "null"}}},
            }),
            "<f>null</f>",
            "<f>1</f>",
        ),
        (
            "structural_tag",
            json.dumps({
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}],
                "triggers": ["<f"],
            }),
            "so <f>true</f>",
            "so <f>1</f>",
        ),
    ],
)  # fmt: skip
def test_every_kind_of_grammar_takes_what_it_should(
    backend: XgrammarBackend, tokenizer: Tokenizer, kind: GrammarKind, text: str, good: str, bad: str
) -> None:
    one = matcher(backend, kind, text)
    ids = tokenizer.encode(good)
    assert one.advance(ids) == len(ids)
    assert set(EOS) <= set(allowed(one)[0])
    other = matcher(backend, kind, text)
    taken = True
    for token in tokenizer.encode(bad):
        taken = taken and token in allowed(other)[0]
        if taken:
            other.advance([token])
    assert not (taken and EOS_ID in allowed(other)[0])


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "{", "json_schema: not JSON"),
        ("json_schema", "[1]", "json_schema: Schema should be an object or bool"),
        ("json_schema", '{"type": "colour"}', 'json_schema: Unsupported type "colour"'),
        ("json_schema", '{"$ref": "#/$defs/none"}', "Cannot find field"),
        ("json_schema", '{"type": "string", "pattern": "[a"}', "Unclosed"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', r"\$: uniqueItems cannot be enforced"),
        ("json_schema", '{"type": "string", "pattern": "a{2001}"}', "repeats more than 2000 times"),
        ("json_schema", "[" * 100_000, "json_schema: (too many levels|not JSON)"),
        ("json_schema", '"' + "x" * 600_000 + '"', "at most 524288 are taken"),
        ("regex", "(a", "regex: .*parenthesis"),
        ("regex", "a(?!b)", "look-around"),
        ("regex", "a{1,20000}", "repeats more than"),
        ("ebnf", "root ::= (", "ebnf: EBNF parser error"),
        ("ebnf", 'start ::= "a"', "root"),
        ("structural_tag", "[]", "structural_tag: not a JSON object"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "none such"}}', "Format type not recognized"),
        ("structural_tag", '{"type": "structural_tag", "structures": [{}]}', "needs structures, each with"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}',
            r"structural_tag.format.json_schema: this schema cannot be enforced: \$: not",
        ),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_its_reason(
    backend: XgrammarBackend, kind: GrammarKind, text: str, says: str
) -> None:
    done = compiled(backend, kind, text)
    assert not done.ok
    assert re.search(says, done.error), done.error
    assert ".cc:" not in done.error
    with pytest.raises(GrammarError):
        backend.matcher(done.key)


def test_a_grammar_that_overruns_is_refused_and_its_thread_left_behind(folder: Path) -> None:
    made = XgrammarBackend(folder, vocab_size=VOCAB, eos_ids=EOS, compile_timeout_s=1e-9, max_whitespace=2)
    try:
        done = compiled(made, "regex", ".{0,400}x.{0,300}y")
        assert not done.ok
        assert "takes more than 1e-09 s to compile" in done.error
    finally:
        made.close()


def test_a_known_grammar_is_ready_at_once_and_one_that_was_given_up_is_compiled_again(folder: Path) -> None:
    made = XgrammarBackend(folder, vocab_size=VOCAB, eos_ids=EOS, compile_timeout_s=DEADLINE_S, max_whitespace=2, cache_bytes=1)
    try:
        first = compiled(made, "regex", "a+")
        made.submit(first.key, Grammar("regex", "a+"))
        made.submit(first.key, Grammar("regex", "a+"))
        assert made.poll() == [Compiled(first.key, True)]
        compiled(made, "regex", "b+")
        assert allowed(made.matcher(first.key)) == allowed(matcher(made, "regex", "a+"))
        made.forget(first.key)
        with pytest.raises(GrammarError, match="is not compiled"):
            made.matcher("regex:unknown")
    finally:
        made.close()


def test_without_white_space_answers_are_compact(folder: Path, tokenizer: Tokenizer) -> None:
    made = open_backend("xgrammar", tokenizer_folder=folder, vocab_size=VOCAB, eos_ids=EOS, compile_timeout_s=DEADLINE_S, max_whitespace=0)
    try:
        assert isinstance(made, XgrammarBackend)
        answer = tokenizer.decode(follow(matcher(made, "json_schema", json.dumps(PERSON)), noise(1), lambda _: [], 1))
        assert answer == json.dumps(json.loads(answer), separators=(",", ":"), ensure_ascii=False) or "\\" in answer
    finally:
        made.close()


def test_no_backend_refuses_with_the_known_text(folder: Path) -> None:
    none = open_backend("none", tokenizer_folder=folder, vocab_size=VOCAB, eos_ids=EOS, compile_timeout_s=1, max_whitespace=1)
    assert compiled(none, "regex", "a") == Compiled(grammar_key(Grammar("regex", "a")), False, NOT_SUPPORTED)
    assert none.poll() == []
    with pytest.raises(GrammarError):
        none.matcher("x")
    with pytest.raises(ValueError, match="--grammar-backend"):
        open_backend("other", tokenizer_folder=folder, vocab_size=VOCAB, eos_ids=EOS, compile_timeout_s=1, max_whitespace=1)
    with pytest.raises(ValueError, match="no end of text"):
        open_backend("xgrammar", tokenizer_folder=folder, vocab_size=VOCAB, eos_ids=(), compile_timeout_s=1, max_whitespace=1)


def test_masks_rule_out_what_they_should_in_the_rows_they_are_for() -> None:
    masks = allocate_mask(3, 70)
    set_only(masks[0], [0, 31, 69])
    set_only(masks[2], [63])
    assert [allowed_tokens(row, 70) for row in masks] == [[0, 31, 69], list(range(70)), [63]]
    logits = torch.zeros(3, 70)
    apply_masks(logits, masks)
    assert [torch.nonzero(row == 0).flatten().tolist() for row in logits] == [[0, 31, 69], list(range(70)), [63]]
    only = torch.zeros(3, 70)
    apply_masks(only, masks, [2])
    assert int(torch.isinf(only).sum()) == 69
