"""Constrained decoding by xgrammar."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import xgrammar

from engine.grammar.backends import Compiled, GrammarError
from engine.grammar.cache import CompileCache
from engine.grammar.compiling import CompilePool
from engine.grammar.masks import ALL_ALLOWED, allocate_mask, apply_masks, set_only
from engine.grammar.trial import Trials
from engine.grammar.xgrammar_compiler import XgrammarCompiler, doubtful
from engine.messages import Grammar

CACHE_BYTES = 256 << 20
_SOURCES = 4096
_CLOSE_S = 1.0
_PREPARE_S = 30.0  # for the first trial to load the compiler


class XgrammarBackend:
    """Compiles with xgrammar; see ``backends.GrammarBackend`` for what the methods promise."""

    def __init__(self, tokenizer_folder: str | Path, *, vocab_size: int, eos_ids: Sequence[int], compile_timeout_s: float,
                 max_whitespace: int, trials: Trials | None = None, cache_bytes: int = CACHE_BYTES,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        if not eos_ids:
            raise ValueError(f"{tokenizer_folder}: the model names no end of text, which a grammar needs to end an answer")
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._compiler = XgrammarCompiler(tokenizer_folder, vocab_size=vocab_size, eos_ids=eos_ids, max_whitespace=max_whitespace)
        self._timeout_s = compile_timeout_s
        self._trials = trials
        # With trials it is they that keep the time, and what passed one is compiled once more.
        patience_s = compile_timeout_s if trials is None else 2 * compile_timeout_s + _PREPARE_S
        self._pool = CompilePool(self._compile, timeout_s=compile_timeout_s, patience_s=patience_s, clock=clock)
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
            compiled = self._compiler.compile(source)
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
        if self._trials is not None:
            self._trials.close()

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises GrammarError with the reason. Runs in a thread of the pool."""
        if self._trials is not None and doubtful(grammar):
            self._trials.check(grammar, self._timeout_s)
        return self._compiler.compile(grammar)


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
