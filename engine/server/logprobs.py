"""Log-probabilities as OpenAI shows them, in the two forms of its two routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.messages import TokenLogprob
from engine.server.choice import TokenAt
from engine.text.tokenizer import Tokenizer

_LEAST = -9999.0
"""JSON has no minus infinity; OpenAI writes this for it."""


def for_chat(tokenizer: Tokenizer, tokens: Sequence[TokenAt], top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of chat: the token, its bytes and the ``top`` likeliest in its place."""
    content = [
        {
            **_entry(tokenizer, at.logprob.token, at.logprob.logprob),
            "top_logprobs": [_entry(tokenizer, token, value) for token, value in at.logprob.top[:top]],
        }
        for at in tokens
    ]
    return {"content": content, "refusal": None}


def for_completion(tokenizer: Tokenizer, prompt: Sequence[int], prompt_logprobs: Sequence[TokenLogprob] | None,
                   tokens: Sequence[TokenAt], top: int) -> dict[str, Any]:  # fmt: skip
    """``choices[].logprobs`` of plain completions.

    With ``prompt_logprobs`` (echo) the prompt's tokens come first, and the very first has no probability (null).
    ``text_offset`` counts characters of the choice's text.
    """
    shown: list[tuple[int, int, TokenLogprob | None]] = []  # where, token, its probabilities
    start = 0
    if prompt_logprobs is not None:
        for token, entry in zip(prompt, [None, *prompt_logprobs], strict=True):
            shown.append((start, token, entry))
            start += len(tokenizer.token_text(token))
    shown += [(start + at.offset, at.logprob.token, at.logprob) for at in tokens]

    def likeliest(entry: TokenLogprob | None) -> dict[str, float] | None:
        return None if entry is None else {tokenizer.token_text(token): _finite(value) for token, value in entry.top[:top]}

    return {
        "tokens": [tokenizer.token_text(token) for _, token, _ in shown],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for _, _, entry in shown],
        "top_logprobs": [likeliest(entry) for _, _, entry in shown] if top else None,
        "text_offset": [offset for offset, _, _ in shown],
    }


def _entry(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(value), "bytes": list(raw)}


def _finite(value: float) -> float:
    return max(value, _LEAST)
