"""Constrained decoding behind one protocol. A backend lives in rank 0's process; its methods are for one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.grammar.keys import grammar_key
from engine.messages import Grammar

if TYPE_CHECKING:
    import torch

    from engine.grammar.trial import Trials

__all__ = ["Compiled", "GrammarBackend", "GrammarError", "Matcher", "NoneBackend", "grammar_key", "open_backend"]

NOT_SUPPORTED = (
    "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported "
    "when the server is launched with --grammar-backend none"
)


class GrammarError(ValueError):
    """A grammar that cannot be used; the text is fit for the client who sent it."""


@dataclass(frozen=True)
class Compiled:
    """How a submitted grammar ended. ``error`` is empty, or the reason for a 400 (a 503 where ``busy``: it was never
    begun, because too many others are on their way)."""

    key: str
    ok: bool
    error: str = ""
    busy: bool = False


class Matcher(Protocol):
    """The grammar's state for one request: a finite-state machine over its output tokens."""

    def masks(self, drafts: Sequence[int], out: torch.Tensor) -> None:
        """Write which tokens may come at each position of a verify; the state is as before afterwards.

        Args:
            out: int32 [1 + len(drafts), words] on the CPU. Row i is for the token after ``drafts[:i]``. Rows that no
                accepted run can reach allow everything; rows after the end allow the ends of text only.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> int:
        """Take an accepted run, exactly once; how many of its tokens the grammar took.

        Tokens after the end are nobody's fault and are not taken.

        Raises:
            GrammarError: a token that the grammar does not allow, so a mask was not applied.
        """
        ...

    @property
    def terminated(self) -> bool:
        """Whether an end of text was taken."""
        ...


class GrammarBackend(Protocol):
    def submit(self, key: str, grammar: Grammar) -> None:
        """Begin to compile, off this thread. ``key`` is ``grammar_key(grammar)``; a later ``poll`` tells how it ended."""
        ...

    def poll(self) -> list[Compiled]:
        """What has ended since the last call; each submitted key that was waited for comes once. Never blocks."""
        ...

    def matcher(self, key: str) -> Matcher:
        """A new matcher of a grammar that has compiled.

        Raises:
            GrammarError: this key was never compiled.
        """
        ...

    def allocate_mask(self, rows: int) -> torch.Tensor:
        """int32 [rows, words], everything allowed."""
        ...

    def apply_masks(self, logits: torch.Tensor, mask: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        """Make what ``mask`` rules out -inf in ``logits`` (f32 [R, V]), in place; in ``rows``, or all."""
        ...

    def forget(self, key: str) -> None:
        """A request that submitted this key has ended: its grammar is the first to go when room is needed."""
        ...

    def close(self) -> None:
        """Let go of everything; waits a short time for compilations on their way."""
        ...


class NoneBackend:
    """``--grammar-backend none``: every grammar is refused."""

    def __init__(self) -> None:
        self._refused: list[str] = []

    def submit(self, key: str, grammar: Grammar) -> None:
        self._refused.append(key)

    def poll(self) -> list[Compiled]:
        refused, self._refused = list(dict.fromkeys(self._refused)), []
        return [Compiled(key, False, NOT_SUPPORTED) for key in refused]

    def matcher(self, key: str) -> Matcher:
        raise GrammarError(NOT_SUPPORTED)

    def allocate_mask(self, rows: int) -> torch.Tensor:
        raise GrammarError(NOT_SUPPORTED)

    def apply_masks(self, logits: torch.Tensor, mask: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        raise GrammarError(NOT_SUPPORTED)

    def forget(self, key: str) -> None:
        pass

    def close(self) -> None:
        pass


def open_backend(name: str, *, tokenizer_folder: str | Path, vocab_size: int, eos_ids: Sequence[int], compile_timeout_s: float,
                 max_whitespace: int, trials: Trials | None = None) -> GrammarBackend:  # fmt: skip
    """The backend that ``--grammar-backend`` names.

    Args:
        vocab_size: width of the model's logits, which may be more than the tokenizer's vocabulary.
        eos_ids: what ends an answer; allowed only where the grammar is complete.
        max_whitespace: most white space between two JSON tokens, in characters.
        trials: where doubtful grammars are tried first; closed with the backend.

    Raises:
        ValueError: an unknown name, or no end of text to stop at.
    """
    if name == "none":
        return NoneBackend()
    if name == "xgrammar":
        from engine.grammar.xgrammar_backend import XgrammarBackend

        return XgrammarBackend(tokenizer_folder, vocab_size=vocab_size, eos_ids=eos_ids, compile_timeout_s=compile_timeout_s,
                               max_whitespace=max_whitespace, trials=trials)  # fmt: skip
    raise ValueError(f"--grammar-backend: {name!r} is not one of xgrammar, none")
