"""Constrained decoding by xgrammar."""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import xgrammar

from engine.grammar.backends import Compiled, GrammarError
from engine.grammar.cache import CompileCache
from engine.grammar.compiling import CompilePool
from engine.grammar.enforcement import has_lookaround, unenforced
from engine.grammar.keys import canonical
from engine.grammar.masks import ALL_ALLOWED, allocate_mask, apply_masks, set_only
from engine.messages import Grammar
from engine.text.tokenizer import Tokenizer

CACHE_BYTES = 256 << 20
COMPILER_CACHE_BYTES = 128 << 20
"""xgrammar's own, beneath: rules that different schemas share compile in a thirtieth of the time."""
MAX_TEXT = 512 << 10
"""Characters of a grammar."""
MAX_REPEAT = 2_000
NOT_IN_JSON = frozenset(range(0x20)) - frozenset(b"\n\r")
"""Bytes that JSON needs nowhere. Tokens that hold one are hidden from JSON grammars, because strings with a minLength
or maxLength would take them (all but line ends) as they are. A tab between JSON tokens is no loss."""
_SOURCES = 4096
_CLOSE_S = 1.0
_JSON_OBJECT = '{"type":"object"}'
_REPEAT = re.compile(r"\{(\d+)?(?:,(\d+)?)?\}")
_NOISE = re.compile(r"^(?:\[[\d:]+\] )?\S*\.cc:\d+: |Check failed: \(.*?\) is false: ", re.MULTILINE)


class XgrammarBackend:
    """Compiles with xgrammar; see ``backends.GrammarBackend`` for what the methods promise."""

    def __init__(self, tokenizer_folder: str | Path, *, vocab_size: int, eos_ids: Sequence[int], compile_timeout_s: float,
                 max_whitespace: int, cache_bytes: int = CACHE_BYTES, clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        if not eos_ids:
            raise ValueError(f"{tokenizer_folder}: the model names no end of text, which a grammar needs to end an answer")
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._max_whitespace = max_whitespace
        tokenizer = Tokenizer.load(tokenizer_folder)
        self._compiler = _compiler(tokenizer_info(tokenizer, vocab_size, eos_ids))
        self._json_compiler = _compiler(tokenizer_info(tokenizer, vocab_size, eos_ids, hide=NOT_IN_JSON))
        self._pool = CompilePool(self._compile, timeout_s=compile_timeout_s, clock=clock)
        self._cache: CompileCache[xgrammar.CompiledGrammar] = CompileCache(cache_bytes)
        self._sources: OrderedDict[str, Grammar] = OrderedDict()
        self._ready: list[Compiled] = []

    def submit(self, key: str, grammar: Grammar) -> None:
        if self._cache.get(key) is not None:
            self._cache.need(key)
            self._ready.append(Compiled(key, True))
            return
        self._sources[key] = grammar
        self._sources.move_to_end(key)
        while len(self._sources) > _SOURCES:
            self._sources.popitem(last=False)
        self._pool.submit(key, grammar)

    def poll(self) -> list[Compiled]:
        ready, self._ready = self._ready, []
        for outcome in self._pool.poll():
            if outcome.compiled is not None:
                self._cache.put(outcome.key, outcome.compiled, outcome.compiled.memory_size_bytes)
            if not outcome.late:
                self._cache.need(outcome.key)
                ready.append(Compiled(outcome.key, outcome.compiled is not None, outcome.error, outcome.busy))
        return list({done.key: done for done in ready}.values())

    def matcher(self, key: str) -> XgrammarMatcher:
        compiled = self._cache.get(key)
        if compiled is None:
            # Only a request that waited so long that the cache gave its grammar up comes here: compile once more.
            source = self._sources.get(key)
            if source is None:
                raise GrammarError(f"grammar {key} is not compiled")
            compiled = self._compile(source)
            self._cache.put(key, compiled, compiled.memory_size_bytes)
        return XgrammarMatcher(compiled, self._eos_ids)

    def allocate_mask(self, rows: int) -> torch.Tensor:
        return allocate_mask(rows, self._vocab_size)

    def apply_masks(self, logits: torch.Tensor, mask: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        apply_masks(logits, mask, rows)

    def forget(self, key: str) -> None:
        self._cache.release(key)

    def close(self) -> None:
        self._pool.close(_CLOSE_S)

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises GrammarError with the reason. Runs in a thread of the pool; the compiler may be shared between threads."""
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
                    return self._compiler.compile_regex(grammar.text)
                case "ebnf":
                    return self._compiler.compile_grammar(grammar.text)
                case "structural_tag":
                    text = json.dumps(self._structural_tag(grammar))
                    # Free text between tags may hold tabs, unless a length would let them into JSON.
                    compiler = self._json_compiler if '"minLength"' in text or '"maxLength"' in text else self._compiler
                    return compiler.compile_structural_tag(text)
        except (RuntimeError, TypeError) as error:  # xgrammar raises RuntimeError for whatever it cannot read
            raise GrammarError(f"{grammar.kind}: {_reason(error)}") from error

    def _json(self, schema: str) -> xgrammar.CompiledGrammar:
        if self._max_whitespace == 0:
            return self._json_compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        return self._json_compiler.compile_json_schema(schema, any_whitespace=True, max_whitespace_cnt=self._max_whitespace)

    def _structural_tag(self, grammar: Grammar) -> Any:
        tag = _present_form(_parse(grammar))
        _check_tag(tag, grammar.kind)
        # Inside a tag there is no way to allow no white space at all.
        return _with_whitespace(tag, max(1, self._max_whitespace))


class XgrammarMatcher:
    """See ``backends.Matcher``."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, eos_ids: Sequence[int]) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(eos_ids))
        self._eos_ids = tuple(eos_ids)

    @property
    def terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def masks(self, drafts: Sequence[int], out: torch.Tensor) -> None:
        if out.shape[0] != 1 + len(drafts):
            raise ValueError(f"{out.shape[0]} mask rows for {len(drafts)} drafts")
        out.fill_(ALL_ALLOWED)  # what the traversal does not reach stays so
        if self._matcher.is_terminated():
            for row in out:
                set_only(row, self._eos_ids)
            return
        if not drafts:
            self._matcher.fill_next_token_bitmask(out, 0)
            return
        size = len(drafts)
        child = torch.tensor([*range(1, size + 1), -1], dtype=torch.int64)
        sibling = torch.full((size + 1,), -1, dtype=torch.int64)
        self._matcher.traverse_draft_tree(child, sibling, torch.tensor([0, *drafts], dtype=torch.int64), out)
        for at in torch.nonzero(~out.any(dim=1)).flatten().tolist():  # after a drafted end of text nothing is allowed
            set_only(out[at], self._eos_ids)

    def advance(self, tokens: Sequence[int]) -> int:
        for taken, token in enumerate(tokens):
            if self._matcher.is_terminated():
                return taken
            if not self._matcher.accept_token(token):
                raise GrammarError(f"token {token}, number {taken} of an accepted run, is not allowed here: its mask was not applied")
        return len(tokens)


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
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=True, cache_limit_bytes=COMPILER_CACHE_BYTES)


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
