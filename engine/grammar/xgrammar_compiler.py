"""Grammars in any of the five forms, compiled by xgrammar; and what of them must not be taken."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xgrammar

from engine.grammar.backends import GrammarError
from engine.grammar.enforcement import has_lookaround, unenforced
from engine.grammar.keys import canonical
from engine.messages import Grammar
from engine.text.tokenizer import Tokenizer

CACHE_BYTES = 128 << 20
"""xgrammar's own, beneath ours: rules that different schemas share compile in a thirtieth of the time."""
MAX_TEXT = 512 << 10
"""Characters of a grammar."""
MAX_REPEAT = 2_000
NOT_IN_JSON = frozenset(range(0x20)) - frozenset(b"\n\r")
"""Bytes that JSON needs nowhere. Tokens that hold one are hidden from JSON grammars, because strings with a minLength
or maxLength would take them (all but line ends) as they are. A tab between JSON tokens is no loss."""
_JSON_OBJECT = '{"type":"object"}'
_REPEAT = re.compile(r"\{(\d+)?(?:,(\d+)?)?\}")
_NOISE = re.compile(r"^(?:\[[\d:]+\] )?\S*\.cc:\d+: |Check failed: \(.*?\) is false: ", re.MULTILINE)
_DOUBTFUL = re.compile(r'"(?:pattern|patternProperties|propertyNames|format|regex|grammar|ebnf)"|\d{4}')


class XgrammarCompiler:
    """May be shared between threads. It lets go of the interpreter's lock.

    Args:
        vocab_size: width of the model's logits, which may be more than the tokenizer's vocabulary.
        eos_ids: what ends an answer.
        max_whitespace: most white space between two JSON tokens, in characters.
    """

    def __init__(self, tokenizer_folder: str | Path, *, vocab_size: int, eos_ids: Sequence[int], max_whitespace: int) -> None:
        tokenizer = Tokenizer.load(tokenizer_folder)
        self._max_whitespace = max_whitespace
        self._plain = _compiler(tokenizer_info(tokenizer, vocab_size, eos_ids))
        self._for_json = _compiler(tokenizer_info(tokenizer, vocab_size, eos_ids, hide=NOT_IN_JSON))

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises GrammarError with the reason."""
        grammar = canonical(grammar)
        if len(grammar.text) > MAX_TEXT:
            raise GrammarError(f"{grammar.kind}: {len(grammar.text)} characters; at most {MAX_TEXT} are taken")
        if grammar.kind in ("regex", "ebnf"):
            _check_repeats(grammar.kind, grammar.text)
        try:
            match grammar.kind:
                case "json_object":
                    return self._json(_JSON_OBJECT)
                case "json_schema":
                    _check_schema(grammar.kind, _parse(grammar))
                    return self._json(grammar.text)
                case "regex":
                    if has_lookaround(grammar.text):
                        raise GrammarError("regex: look-around cannot be enforced")
                    return self._plain.compile_regex(grammar.text)
                case "ebnf":
                    return self._plain.compile_grammar(grammar.text)
                case "structural_tag":
                    text = json.dumps(self._structural_tag(grammar))
                    # Free text between tags may hold tabs, unless a length would let them into JSON.
                    compiler = self._for_json if '"minLength"' in text or '"maxLength"' in text else self._plain
                    return compiler.compile_structural_tag(text)
        except (RuntimeError, TypeError) as error:  # xgrammar raises RuntimeError for whatever it cannot read
            raise GrammarError(f"{grammar.kind}: {_reason(error)}") from error

    def _json(self, schema: str) -> xgrammar.CompiledGrammar:
        if self._max_whitespace == 0:
            return self._for_json.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        return self._for_json.compile_json_schema(schema, any_whitespace=True, max_whitespace_cnt=self._max_whitespace)

    def _structural_tag(self, grammar: Grammar) -> Any:
        tag = _present_form(_parse(grammar))
        _check_tag(tag, grammar.kind)
        # Inside a tag there is no way to allow no white space at all.
        return _with_whitespace(tag, max(1, self._max_whitespace))


def doubtful(grammar: Grammar) -> bool:
    """Whether a compilation might take for ever: anything with an automaton of the client's own making or a large number."""
    return grammar.kind in ("regex", "ebnf") or _DOUBTFUL.search(grammar.text) is not None


def tokenizer_info(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], hide: frozenset[int] = frozenset()
) -> xgrammar.TokenizerInfo:
    """The vocabulary as bytes. What has none is allowed by no grammar: special tokens, padding of the output layer, and
    tokens that hold a byte of ``hide``."""
    vocabulary = [tokenizer.token_bytes(token) for token in range(vocab_size)]
    for token in range(vocab_size):
        if (token in tokenizer.special_ids and token not in eos_ids) or not hide.isdisjoint(vocabulary[token]):
            vocabulary[token] = b""
    return xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_ids))


def _compiler(info: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=True, cache_limit_bytes=CACHE_BYTES)


def _parse(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.text)
    except ValueError as error:
        raise GrammarError(f"{grammar.kind}: not JSON: {error}") from error
    except RecursionError as error:
        raise GrammarError(f"{grammar.kind}: too many levels") from error


def _check_schema(name: str, schema: Any) -> None:
    reasons = unenforced(schema)
    if reasons:
        more = f" (and {len(reasons) - 5} more)" if len(reasons) > 5 else ""
        raise GrammarError(f"{name}: this schema cannot be enforced: {'; '.join(reasons[:5])}{more}")
    for pattern in _patterns(schema):
        _check_repeats(f"{name}: pattern", pattern)


def _patterns(node: Any) -> list[str]:
    if isinstance(node, list):
        return [pattern for item in node for pattern in _patterns(item)]
    if not isinstance(node, dict):
        return []
    own = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
    return own + [pattern for value in node.values() for pattern in _patterns(value)]


def _check_repeats(name: str, pattern: str) -> None:
    """Refuse repetitions that nobody means. What else is slow meets the deadline."""
    for least, most in _REPEAT.findall(pattern):
        if max(int(least or 0), int(most or 0)) > MAX_REPEAT:
            raise GrammarError(f"{name}: {{{least},{most}}} repeats more than {MAX_REPEAT} times")


def _present_form(tag: Any) -> Any:
    """Today's form of a structural tag; the former one (``structures`` and ``triggers``) is rewritten."""
    if not isinstance(tag, dict):
        raise GrammarError("structural_tag: not a JSON object")
    if "structures" not in tag:
        return tag
    try:
        tags = [{"begin": one["begin"], "content": {"type": "json_schema", "json_schema": one["schema"]}, "end": one["end"]}
                for one in tag["structures"]]  # fmt: skip
        return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}
    except (KeyError, TypeError) as error:
        raise GrammarError("structural_tag: needs structures, each with begin, schema and end, and triggers") from error


def _with_whitespace(node: Any, most: int) -> Any:
    """The same formats, those of JSON with a limit to white space unless they have one."""
    if isinstance(node, list):
        return [_with_whitespace(item, most) for item in node]
    if not isinstance(node, dict):
        return node
    made = {name: value if name == "json_schema" else _with_whitespace(value, most) for name, value in node.items()}
    return {"max_whitespace_cnt": most, **made} if "json_schema" in made else made


def _check_tag(node: Any, path: str) -> None:
    if isinstance(node, list):
        for index, item in enumerate(node):
            _check_tag(item, f"{path}[{index}]")
    elif isinstance(node, dict):
        for name, value in node.items():
            if name == "json_schema":
                _check_schema(f"{path}.{name}", value)
            else:
                _check_tag(value, f"{path}.{name}")


def _reason(error: Exception) -> str:
    lines = [line for line in _NOISE.sub("", str(error)).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).strip()[:300]
